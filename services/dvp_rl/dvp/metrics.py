"""How far the two sides are apart, measured before any rejection: the tokens left by a rejection always look healthy.

l = train - infer log-prob, samples from infer. Metrics of l cover only model tokens INSIDE the trainer's safe set: the
true KL is infinite at an outside token, so outside tokens have a rate of their own. Everything is in float64. A metric
with nothing to average over is absent from the result, so every value is a finite number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .correction import Correction, level_ratios
from .evidence import Evidence
from .options import Level

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Bool, Float


PRUNED_MASS = 0.999
"""`pruned/share` counts the positions where the engine kept at most this much of the probability."""


@dataclass(frozen=True)
class MetricBatch:
    """One training batch of N sequences, all on one device."""

    seen: Evidence
    advantages: Float[Tensor, " N"]
    rewards: Float[Tensor, " N"]
    correction: Correction
    level: Level
    """Level of the correction's weights."""
    cap: float
    """C of the correction, for the predicted keep rates."""


class MisHealth(NamedTuple):
    """Predicted keep rates of MIS if log w is normal: mean -K, variance 2 K, K = KL(infer || train) of a sequence."""

    kl_sequence: float
    keep_upper: float
    """P(w <= C). Never below 0.88 at C = 2, so it does not indicate health; the kept weight does."""
    keep_two_sided: float
    """P(1/C <= w <= C)."""
    kept_weight_upper: float
    """E[w; w <= C] = Phi((ln C - K) / sqrt(2 K)): the share of the trainer's own distribution that is trained on."""
    kept_weight_two_sided: float


def mismatch_metrics(batch: MetricBatch) -> dict[str, float]:
    """All metrics of the batch by name; a prefix of the name gives the group."""
    named = _divergence(batch) | _weights(batch) | _rejection(batch) | _pruning(batch)
    values = {name: float(value) for name, value in named.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def mis_health(kl_token: float, length: float, cap: float) -> MisHealth:
    """Predicted keep rates. `length`: mean number of model tokens per sequence. With a KL estimate <= 0, all are 1."""
    K = max(kl_token * length, 0.0)
    if K == 0.0:
        return MisHealth(0.0, 1.0, 1.0, 1.0, 1.0)
    spread, edge = math.sqrt(2 * K), math.log(cap)
    return MisHealth(
        kl_sequence=K,
        keep_upper=_phi((edge + K) / spread),
        keep_two_sided=_phi((edge + K) / spread) - _phi((K - edge) / spread),
        kept_weight_upper=_phi((edge - K) / spread),
        kept_weight_two_sided=_phi((edge - K) / spread) - _phi((-edge - K) / spread),
    )


def set_overlap(
    train_set: Bool[Tensor, "*batch vocab"], infer_set: Bool[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """|V_S & V'_S| / |V_S| per position, for callers that have the logits of both sides."""
    return (train_set & infer_set).sum(-1) / train_set.sum(-1)


def effective_sample_size(weights: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """1 / mean((w / mean w)^2), in [1/n, 1]; meaningless for sequence weights once K exceeds about 2."""
    weights = weights.double()
    return 1 / (weights / weights.mean()).square().mean()


def _divergence(batch: MetricBatch) -> dict[str, Tensor]:
    """Token-level estimates, and chi2_seq over the inside tokens of each sequence."""
    valid = _valid(batch)
    log_ratios = batch.correction.log_ratios.double()
    log_r = log_ratios[valid]
    ratio = log_r.exp()
    advantages = batch.advantages.double().unsqueeze(-1).expand_as(log_ratios)[valid]
    skew = -(ratio - 1) * advantages
    kl = -log_r.mean()
    sequence = level_ratios(log_ratios, valid, Level.SEQUENCE)[valid.any(-1)]
    return {
        "mismatch/kl": kl,
        "mismatch/k3_kl": (ratio - 1 - log_r).mean(),
        "mismatch/chi2_token": ratio.square().mean() - 1,
        "mismatch/chi2_seq": sequence.square().mean() - 1,
        "mismatch/ppl_train": (-batch.seen.train.logprobs.double()[valid].mean()).exp(),
        "mismatch/ppl_infer": (-batch.seen.infer.logprobs.double()[valid].mean()).exp(),
        "mismatch/ppl_ratio": kl.exp(),
        "mismatch/ratio_max": _extreme(ratio, torch.max),
        "mismatch/ratio_min": _extreme(ratio, torch.min),
        "mismatch/skew": skew.mean(),
        "mismatch/skew_positive": skew[advantages > 0].mean(),
        "mismatch/skew_negative": skew[advantages < 0].mean(),
        "mismatch/outside_rate": (batch.seen.mask & ~batch.seen.train.inside).sum() / batch.seen.mask.sum(),
    }


def _weights(batch: MetricBatch) -> dict[str, Tensor | float]:
    """Metrics of w before rejection, at the correction's level, the kept weight, and predicted keep rates."""
    valid, units = _valid(batch), _units(batch.seen.mask, batch.level)
    log_ratios = batch.correction.log_ratios.double()
    w = level_ratios(log_ratios, valid, batch.level).expand_as(valid)[_units(valid, batch.level)]
    kept_weight = batch.correction.ratios.where(batch.correction.kept, 0.0)[units].double().mean()
    length = valid.sum(-1)[valid.any(-1)].double().mean()
    health = mis_health(-float(log_ratios[valid].mean()), float(length), batch.cap)
    return {
        "weight/ess": effective_sample_size(w),
        "weight/max": _extreme(w, torch.max),
        "weight/min": _extreme(w, torch.min),
        "weight/mean": w.mean(),
        "mis/kept_weight": kept_weight,
        **{f"mis/predicted_{name}": value for name, value in health._asdict().items()},
    }


def _rejection(batch: MetricBatch) -> dict[str, Tensor]:
    """Shares of sequences (of tokens for MIS at token level), out of those with a model token."""
    real, units = batch.seen.mask.any(-1), _units(batch.seen.mask, batch.level)
    veto = batch.correction.veto
    rejected = ~batch.correction.kept & ~veto.dropped.unsqueeze(-1)
    shares = {f"veto/{reason}": flags[real].double().mean() for reason, flags in veto._asdict().items()}
    return shares | {
        "veto/total": veto.dropped[real].double().mean(),
        "mis/fraction": rejected[units].double().mean(),
    }


def _pruning(batch: MetricBatch) -> dict[str, Tensor]:
    """The effect of pruning: kept masses and counts at all model tokens, the log-probs of both sides with and without
    pruning (log pi = log pi_mp + log Z for a token inside), and the two bounds on |J_mp - J|."""
    mask, inside, infer = batch.seen.mask, batch.seen.mask & batch.seen.train.inside, batch.seen.infer
    infer_mass = infer.kept_mass[mask].double()
    metrics = {
        "pruned/share": (infer_mass <= PRUNED_MASS).double().mean(),
        "pruned/mass": (1 - infer_mass).mean(),
        # A Monte Carlo estimate over the engine's own samples.
        "entropy/constrained": -infer.logprobs[mask].double().mean(),
    }
    for side, own in {"train": batch.seen.train, "infer": infer}.items():
        known = own.kept_mass[mask & ~own.kept_mass.isnan()].double()
        metrics[f"kept/mass_mean_{side}"] = known.mean()
        metrics[f"kept/mass_min_{side}"] = _extreme(known, torch.min)
        metrics[f"kept/count_mean_{side}"] = own.kept_count[mask].double().mean()
        constrained = own.logprobs[inside].double()
        metrics[f"logprob/{side}_constrained"] = constrained.mean()
        metrics[f"logprob/{side}_full"] = (constrained + own.kept_mass[inside].double().log()).mean()
    metrics["mismatch/kl_unmasked"] = metrics["logprob/infer_full"] - metrics["logprob/train_full"]
    return metrics | _bias_bounds(batch)


def _bias_bounds(batch: MetricBatch) -> dict[str, Tensor]:
    """bound: R_max T (1 - Z_min) (Prop. 5.5), doubled if the batch has a negative reward. bound_measured:
    (max R - min R) E[sum_t (1 - Z_t)]. Z is the trainer's; T, Z and R are those of the batch."""
    known = batch.seen.mask & ~batch.seen.train.kept_mass.isnan()
    pruned = (1 - batch.seen.train.kept_mass.double()).where(known, 0.0)
    rewards = batch.rewards.double()
    low, high = _extreme(rewards, torch.min), _extreme(rewards, torch.max)
    sides = torch.where(low < 0, 2.0, 1.0)
    horizon = _extreme(known.sum(-1).double(), torch.max)
    return {
        "bias/bound": sides * _extreme(rewards.abs(), torch.max) * horizon * _extreme(pruned[known], torch.max),
        "bias/bound_measured": (high - low) * pruned.sum(-1)[known.any(-1)].mean(),
    }


def _valid(batch: MetricBatch) -> Bool[Tensor, "N T"]:
    return batch.seen.mask & batch.seen.train.inside & ~batch.correction.log_ratios.isnan()


def _units(mask: Bool[Tensor, "N T"], level: Level) -> Bool[Tensor, "N T"]:
    """One True per weight: every token of the mask at token level, else the first of each sequence."""
    return mask if level is Level.TOKEN else mask & (mask.cumsum(-1) == 1)


def _extreme(values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """The maximum or minimum; NaN if there are no values, as for a mean."""
    return reduce(values) if values.numel() else values.new_tensor(math.nan)


def _phi(x: float) -> float:
    """Standard normal distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))
