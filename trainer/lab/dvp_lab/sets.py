"""The two safe sets of a position, V_S of the trainer and V'_S of the engine, by exact sums over the vocabulary; and
the outcome of the sampled sequences.

Shapes: N sequences, T model tokens, M positions (those of the mask), V tokens in the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from dvp_rl.dvp.correction import correct
from dvp_rl.dvp.metrics import set_overlap
from dvp_rl.dvp.policy import constrained_logprobs, entropy, safe_set

from .mismatch import Estimate, ratio
from .rules import Rule
from .sources import Trace

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

AT_THRESHOLD = 0.5
"""Nats on either side of the threshold over which the mass per nat is averaged."""
CROSSING = 1 / math.sqrt(math.pi)
"""E[(eps_a - eps_b)+] = s / sqrt(pi), or 0.56 s: width in nats of the band that noise carries across the threshold."""


@dataclass(frozen=True)
class Sets:
    """Both safe sets of every position under one rule; [N, T] each, 0 off the mask."""

    mask: Bool[Tensor, "N T"]
    entropy: Float[Tensor, "N T"]
    """Full entropy of the trainer, in nats."""
    overlap: Float[Tensor, "N T"]
    """|V_S & V'_S| / |V_S|"""
    outside: Float[Tensor, "N T"]
    """P(sampled not in V_S), exact."""
    outside_predicted: Float[Tensor, "N T"]
    """Prediction of `outside`: 0.56 s x (mass per nat at the threshold), with the position's own s."""
    train_mass: Float[Tensor, "N T"]
    infer_mass: Float[Tensor, "N T"]
    train_count: Float[Tensor, "N T"]
    infer_count: Float[Tensor, "N T"]
    kl: Float[Tensor, "N T"]
    """KL(infer || train) of the two policies on the tokens that both keep: the mismatch that is left after the veto."""
    kl_full: Float[Tensor, "N T"]
    """KL(infer || train) of the same position without pruning."""

    def mean(self, name: str, where: Tensor | None = None) -> Estimate:
        """The mean of the field `name` over the positions of the mask, or over those of them in `where`."""
        chosen = self.mask if where is None else self.mask & where
        values: Tensor = getattr(self, name)
        return ratio(values.where(chosen, 0.0).sum(1), chosen.sum(1).double())

    def vetoed(self, name: str) -> float:
        """Expected share of sequences with a token outside; the field `name` holds the probability at each position."""
        inside: Tensor = 1 - getattr(self, name).clamp(max=1.0)
        return float((1 - inside.prod(1)).mean())


class Outcome(NamedTuple):
    """The correction of the sampled sequences: veto, then MIS with w <= 2. Means over sequences, except `worst`."""

    veto: Estimate
    veto_outside: Estimate
    mis: Estimate
    kept_weight: Estimate
    pruned: Estimate
    """E[sum_t (1 - Z_t)] of the trainer; times the range of the rewards, it is the measured bound on the bias."""
    worst: float
    """T (1 - Z_min); times R_max, it is the bound of Prop. 5.5."""


@dataclass(frozen=True)
class Seen:
    """What the correction did to each sequence, [N] each."""

    vetoed: Bool[Tensor, " N"]
    outside: Bool[Tensor, " N"]
    masked: Bool[Tensor, " N"]
    kept_weight: Float[Tensor, " N"]
    pruned: Float[Tensor, " N"]
    length: Float[Tensor, " N"]
    least_mass: Float[Tensor, " N"]

    def outcome(self) -> Outcome:
        return Outcome(
            veto=share(self.vetoed),
            veto_outside=share(self.outside),
            mis=share(self.masked),
            kept_weight=share(self.kept_weight),
            pruned=share(self.pruned),
            worst=float(self.length.max() * (1 - self.least_mass.min())),
        )


Part = TypeVar("Part", Sets, Seen)


def joined(parts: Iterable[Part]) -> Part:
    parts = list(parts)
    kind = type(parts[0])
    return kind(**{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(kind)})


def sets_of(trace: Trace, rule: Rule) -> Sets:
    mask, logits = trace.samples.mask, trace.samples.logits
    assert logits is not None, "both sides' logits are needed"
    train, infer = trace.train_logits[mask].double(), logits[mask].double()
    ours, theirs = (safe_set(z, log_min_p=rule(z), temperature=1.0) for z in (train, infer))
    p, q = train.softmax(-1), infer.softmax(-1)
    train_mass, infer_mass = ((w * keep).sum(-1) for w, keep in ((p, ours), (q, theirs)))
    both = ours & theirs
    infer_common, train_common = ((w * both).sum(-1) for w in (q, p))
    gap = q * (q.log() - p.log())
    s = (infer - train).std(-1)

    def spread(values: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, values.double())

    return Sets(
        mask=mask,
        entropy=spread(entropy(train, log_min_p=-math.inf, temperature=1.0)),
        overlap=spread(set_overlap(ours, theirs)),
        outside=spread((q * (theirs & ~ours)).sum(-1) / infer_mass),
        outside_predicted=spread(CROSSING * s * mass_per_nat(infer, rule) / infer_mass),
        train_mass=spread(train_mass),
        infer_mass=spread(infer_mass),
        train_count=spread(ours.sum(-1)),
        infer_count=spread(theirs.sum(-1)),
        kl=spread((gap * both).sum(-1) / infer_common + train_common.log() - infer_common.log()),
        kl_full=spread(gap.sum(-1)),
    )


def mass_per_nat(logits: Float[Tensor, "M V"], rule: Rule) -> Float[Tensor, " M"]:
    """Mass per nat of the full softmax around the threshold."""
    threshold = torch.as_tensor(rule(logits), dtype=logits.dtype).expand(len(logits))[:, None]
    distance = (logits - logits.amax(-1, keepdim=True) - threshold).abs()
    return (logits.softmax(-1) * (distance <= AT_THRESHOLD)).sum(-1) / (2 * AT_THRESHOLD)


def seen_of(trace: Trace, rule: Rule) -> Seen:
    """Applies the correction to samples that were drawn under the rule."""
    token_ids, mask, logprobs, _ = trace.samples
    logits = trace.train_logits
    own = constrained_logprobs(logits, token_ids, log_min_p=rule(logits), temperature=1.0)
    correction = correct(own.logprobs, logprobs, own.inside, mask)
    mass = own.kept_mass.double().where(mask, 1.0)
    first = mask.cumsum(1) == 1
    return Seen(
        vetoed=correction.veto.dropped,
        outside=correction.veto.outside,
        masked=~correction.kept_sequences & ~correction.veto.dropped,
        kept_weight=(correction.weights.double() * first).sum(1),
        pruned=(1 - mass).sum(1),
        length=mask.sum(1).double(),
        least_mass=mass.amin(1),
    )


def share(values: Tensor) -> Estimate:
    """The mean over sequences."""
    return ratio(values.double(), torch.ones(len(values), dtype=torch.float64))
