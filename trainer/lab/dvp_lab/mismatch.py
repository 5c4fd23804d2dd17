"""Delta = log pi_train - log pi_infer from the logits of both sides, by bucket of pi_train.

Shapes: N sequences, T model tokens, V tokens in the vocabulary, B buckets, M positions. Everything is in float64. Sums
over a bucket are exact: over the vocabulary, not over sampled tokens. With eps = z_infer - z_train and p = pi_train:

    sampled    sum_B pi_infer Delta / sum_B pi_infer     the expected Delta of tokens drawn by the engine
    middle     log sum_B pi_train / sum_B pi_infer       between the other two for ANY noise, so a sign proves nothing
    control    sum_B pi_train Delta / sum_B pi_train     the same tokens weighted by the trainer
    m - v, m   their predictions for eps iid N(0, s^2): m = s^2 (1 - C) / 2, v = s^2 [(1 - p)^2 + C - p^2], C = sum p^2
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .sources import Trace
from .study import LEAST, short

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jaxtyping import Bool, Float

EDGES = (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 0.5, 1.0)
TAIL = 1e-3
"""Tokens with a lower pi_train are the tail."""
NUM_TAIL = EDGES.index(TAIL)
TOLERANCE = 1e-12
"""Slack of a bound for float64 rounding, in nats."""
SIGMAS = 3.0
NEXT_TO_NOTHING = 1e-9
"""KL per token, in nats, up to which an engine agrees with the trainer: rounding in float32."""


class Estimate(NamedTuple):
    """A mean with SIGMAS standard errors around it."""

    value: float
    error: float

    @property
    def low(self) -> float:
        return self.value - self.error

    @property
    def high(self) -> float:
        return self.value + self.error

    def __str__(self) -> str:
        """Value and error written alike: both with a power of ten, or both without, unless the error is tiny."""
        least = LEAST if max(abs(self.value), self.error) < LEAST else LEAST / 1000
        return f"{short(self.value, least=least)} ± {short(self.error, 1, least)}"


class BucketSums(NamedTuple):
    """Sums per sequence and bucket, [N, B] each."""

    train: Float[Tensor, "N B"]
    """sum pi_train. The `_delta` fields sum pi Delta; the `_predicted` fields have the prediction in place of Delta."""
    train_delta: Float[Tensor, "N B"]
    train_predicted: Float[Tensor, "N B"]
    infer: Float[Tensor, "N B"]
    infer_delta: Float[Tensor, "N B"]
    infer_predicted: Float[Tensor, "N B"]
    beyond_first_order: Float[Tensor, "N B"]
    """Number of tokens whose |Delta| exceeds 2 eps_max (1 - p), the first-order bound."""
    beyond_exact: Float[Tensor, "N B"]
    """Number of tokens whose Delta is outside of the exact range."""
    tokens: Float[Tensor, "N B"]


class Bucket(NamedTuple):
    """One bucket of pi_train, or several taken together."""

    sampled: Estimate
    control: Estimate
    middle: float
    predicted_sampled: float
    predicted_control: float
    excess: Estimate
    """sampled - predicted_sampled."""
    contrast: Estimate
    """sampled - control, in which a common shift of the bucket cancels; its prediction is -v."""
    mass: float
    """Share of the sampled tokens."""
    beyond_first_order: int
    beyond_exact: int
    tokens: int
    """Number of (token, position) pairs."""

    @property
    def predicted_contrast(self) -> float:
        return self.predicted_sampled - self.predicted_control

    @property
    def is_ordered(self) -> bool:
        """Whether sampled <= middle <= control, as must hold for any noise."""
        return self.sampled.value <= self.middle + TOLERANCE and self.middle <= self.control.value + TOLERANCE

    @property
    def is_met(self) -> bool:
        """Whether the prediction lies within the interval of `sampled`."""
        return abs(self.excess.value) <= self.excess.error


@dataclass(frozen=True)
class Mismatch:
    """The mismatch of one engine, over all its traces."""

    sums: BucketSums
    mask: Bool[Tensor, "N T"]
    delta: Float[Tensor, "N T"]
    """Delta of the sampled tokens, 0 off the mask."""
    kl: Float[Tensor, "N T"]
    """Exact KL(infer || train) of each position, 0 off the mask."""
    spread: Float[Tensor, "N T"]
    """Variance of eps over the vocabulary, 0 off the mask."""
    diffuseness: Float[Tensor, "N T"]
    """1 - C of the trainer, 0 off the mask."""

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def s(self) -> float:
        """Standard deviation of a logit's noise eps."""
        return math.sqrt(float(self.spread.sum()) / self.num_tokens)

    @property
    def s_of_kl(self) -> float:
        """sqrt(2 KL / (1 - C)): the s of iid noise with this KL."""
        return math.sqrt(max(0.0, 2 * float(self.kl.sum() / self.diffuseness.sum())))

    @property
    def kl_token(self) -> float:
        return float(self.kl.sum()) / self.num_tokens

    @property
    def size(self) -> float:
        """Mean |Delta| of the sampled tokens."""
        return float(self.delta.abs().sum()) / self.num_tokens

    def bucket(self, first: int, last: int) -> Bucket:
        """Merges buckets first, .., last - 1 into one."""
        own = BucketSums(*(part[:, first:last].sum(1) for part in self.sums))
        excess = own.infer_delta - own.infer_predicted
        return Bucket(
            sampled=ratio(own.infer_delta, own.infer),
            control=ratio(own.train_delta, own.train),
            middle=math.log(float(own.train.sum() / own.infer.sum())),
            predicted_sampled=ratio(own.infer_predicted, own.infer).value,
            predicted_control=ratio(own.train_predicted, own.train).value,
            excess=ratio(excess, own.infer),
            contrast=difference((own.infer_delta, own.infer), (own.train_delta, own.train)),
            mass=float(own.infer.sum() / self.sums.infer.sum()),
            beyond_first_order=int(own.beyond_first_order.sum()),
            beyond_exact=int(own.beyond_exact.sum()),
            tokens=int(own.tokens.sum()),
        )

    def buckets(self) -> list[tuple[int, Bucket]]:
        """Number and content of every bucket that has a token."""
        found = [int(i) for i in self.sums.tokens.sum(0).nonzero()]
        return [(number, self.bucket(number, number + 1)) for number in found]


def measure(traces: Iterable[Trace]) -> Mismatch:
    """Measures the mismatch on traces that were sampled unpruned."""
    parts = [_measure(trace) for trace in traces]
    sums = BucketSums(*map(torch.cat, zip(*(part.sums for part in parts), strict=True)))
    names = [field.name for field in fields(Mismatch) if field.name != "sums"]
    return Mismatch(sums, **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _measure(trace: Trace) -> Mismatch:
    token_ids, mask, _, logits = trace.samples
    assert logits is not None, "sampled unpruned"
    train, infer = trace.train_logits[mask].double(), logits[mask].double()
    log_p, log_q = train.log_softmax(-1), infer.log_softmax(-1)
    p, q, delta, eps = log_p.exp(), log_q.exp(), log_p - log_q, infer - train
    spread = eps.var(-1)

    def spreads(values: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, values)

    return Mismatch(
        sums=_bucket_sums(p, q, delta, spread[:, None], half_range(eps), mask),
        mask=mask,
        delta=spreads(delta.gather(-1, token_ids[mask][:, None])[:, 0]),
        kl=spreads(-(q * delta).sum(-1)),
        spread=spreads(spread),
        diffuseness=spreads(1 - p.square().sum(-1)),
    )


def _bucket_sums(
    p: Float[Tensor, "M V"],
    q: Float[Tensor, "M V"],
    delta: Float[Tensor, "M V"],
    s2: Float[Tensor, "M 1"],
    eps_max: Float[Tensor, "M 1"],
    mask: Bool[Tensor, "N T"],
) -> BucketSums:
    bucket = torch.bucketize(p, torch.tensor(EDGES[1:-1], dtype=torch.float64), right=True)
    sequence = mask.nonzero()[:, :1]
    cells = (sequence * (len(EDGES) - 1) + bucket).flatten()

    def total(values: Tensor) -> Tensor:
        sums = torch.zeros(len(mask) * (len(EDGES) - 1), dtype=torch.float64)
        return sums.index_add_(0, cells, values.double().expand_as(p).flatten()).view(len(mask), -1)

    C = p.square().sum(-1, keepdim=True)
    m, v = s2 * (1 - C) / 2, s2 * ((1 - p).square() + C - p.square())
    low, high = exact_range(p, eps_max)
    return BucketSums(
        train=total(p),
        train_delta=total(p * delta),
        train_predicted=total(p * m),
        infer=total(q),
        infer_delta=total(q * delta),
        infer_predicted=total(q * (m - v)),
        beyond_first_order=total(delta.abs() > first_order_bound(p, eps_max) + TOLERANCE),
        beyond_exact=total((delta < low - TOLERANCE) | (delta > high + TOLERANCE)),
        tokens=total(torch.ones_like(p)),
    )


def half_range(eps: Float[Tensor, "M V"]) -> Float[Tensor, "M 1"]:
    """max_k |eps_k|, minimised over a common shift of all logits, which changes no policy."""
    return ((eps.amax(-1) - eps.amin(-1)) / 2)[:, None]


def first_order_bound(p: Tensor, eps_max: Tensor) -> Tensor:
    """The bound on |Delta| of Prop. 4.2. To first order in eps only: Delta can exceed it by about 2 eps^2 p (1 - p)."""
    return 2 * eps_max * (1 - p)


def exact_range(p: Tensor, eps_max: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest Delta that any noise up to eps_max can cause."""
    return (p + (1 - p) * (-2 * eps_max).exp()).log(), (p + (1 - p) * (2 * eps_max).exp()).log()


def ratio(above: Float[Tensor, " N"], below: Float[Tensor, " N"]) -> Estimate:
    """sum(above) / sum(below) over independent sequences, with its error by the delta method."""
    value, influence = _ratio(above, below)
    return _estimate(value, influence)


def difference(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Estimate:
    """The difference of two such ratios over the same sequences."""
    (a, influence_a), (b, influence_b) = _ratio(*first), _ratio(*second)
    return _estimate(a - b, influence_a - influence_b)


def _ratio(above: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    value = above.sum() / below.sum()
    return value, (above - value * below) / below.sum()


def _estimate(value: Tensor, influence: Float[Tensor, " N"]) -> Estimate:
    n = len(influence)
    error = float(influence.square().sum().sqrt()) * math.sqrt(n / max(n - 1, 1))
    return Estimate(float(value), SIGMAS * error)
