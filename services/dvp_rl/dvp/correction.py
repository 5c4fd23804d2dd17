"""One weight per token from the log-probs of both sides: token veto, then importance weights (estimator of Thm 5.3).

    l_t = log pi_train_mp(y_t) - log pi_infer_mp(y_t)
    w   = exp(clamp(sum_t l_t, -20, 20))        at sequence level

Shapes: N sequences, T tokens. `mask` is True on model-generated tokens. Only those count; other entries may hold any
value, including NaN. Nothing here has a gradient. The veto drops whole sequences; weights of the remaining ones are
truncated (TIS) or rejected (MIS). A dropped or rejected token has weight 0. Selection uses `where`, never a product,
because inf * 0 is NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .options import Bounds, Level, Mode

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

LOG_VETO = math.log(1e-4)
"""Default veto threshold on l: a token 10,000 times less likely for the trainer than for the engine is not a rounding
error."""
MAX_LOG_WEIGHT = 20.0


class Veto(NamedTuple):
    """Dropped sequences, by reason. A sequence has at most one reason: NaN before outside before numerical."""

    outside: Bool[Tensor, " N"]
    """A sampled token is not in the trainer's safe set. Then pi_train_mp(y) = 0, so dropping y adds no bias."""
    numerical: Bool[Tensor, " N"]
    """Some l_t is below log_veto."""
    nan: Bool[Tensor, " N"]
    """Some l_t is NaN."""

    @property
    def dropped(self) -> Bool[Tensor, " N"]:
        return self.outside | self.numerical | self.nan


class Weights(NamedTuple):
    ratios: Float[Tensor, "N T"]
    """w before truncation and rejection; a sequence's weight is repeated on its tokens. May be NaN."""
    values: Float[Tensor, "N T"]
    """The factor of A grad log pi; 0 where rejected and off the mask. Never NaN."""
    kept: Bool[Tensor, "N T"]
    """Model tokens that were not rejected."""


class Correction(NamedTuple):
    """Weights after the veto, and the values they were computed from."""

    log_ratios: Float[Tensor, "N T"]
    """l, unclamped; meaningless off the mask."""
    veto: Veto
    ratios: Float[Tensor, "N T"]
    """As in `Weights`, vetoed sequences included, for the metrics."""
    weights: Float[Tensor, "N T"]
    """`Weights.values`, and 0 on vetoed sequences."""
    kept: Bool[Tensor, "N T"]

    @property
    def kept_sequences(self) -> Bool[Tensor, " N"]:
        """Sequences with at least one token that is trained on."""
        return self.kept.any(-1)


def correct(
    train_logprobs: Float[Tensor, "N T"],
    infer_logprobs: Float[Tensor, "N T"],
    inside: Bool[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    level: Level = Level.SEQUENCE,
    mode: Mode = Mode.MIS,
    bounds: Bounds = Bounds.UPPER,
    cap: float = 2.0,
    log_veto: float = LOG_VETO,
) -> Correction:
    """Applies the veto, then computes weights. `inside` is the membership flag that `constrained_logprobs` returns for
    the trainer's logits."""
    log_ratios = log_ratio(train_logprobs, infer_logprobs)
    vetoed = veto(log_ratios, inside, mask, log_veto=log_veto)
    weights = importance_weights(log_ratios, mask, level=level, mode=mode, bounds=bounds, cap=cap)
    kept = weights.kept & ~vetoed.dropped.unsqueeze(-1)
    return Correction(log_ratios, vetoed, weights.ratios, weights.values.where(kept, 0.0), kept)


def log_ratio(train_logprobs: Tensor, infer_logprobs: Tensor) -> Tensor:
    """l in float32, or in float64 if either side is float64; detached, unclamped."""
    dtype = torch.promote_types(torch.promote_types(train_logprobs.dtype, infer_logprobs.dtype), torch.float32)
    return train_logprobs.detach().to(dtype) - infer_logprobs.detach().to(dtype)


def veto(
    log_ratios: Float[Tensor, "N T"],
    inside: Bool[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    log_veto: float = LOG_VETO,
) -> Veto:
    """Drops a sequence for a single bad token. With `log_veto` = -inf only NaN and the membership flag veto. The flag
    decides at any size of l: at tiny rho, or averaged over a long sequence, an outside token need not stand out."""
    nan = (mask & log_ratios.isnan()).any(-1)
    outside = (mask & ~inside).any(-1) & ~nan
    # Not `l < log_veto`, which is False for NaN; and on l before any clamp.
    numerical = (mask & ~(log_ratios >= log_veto)).any(-1) & ~nan & ~outside
    return Veto(outside, numerical, nan)


def importance_weights(
    log_ratios: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    level: Level = Level.SEQUENCE,
    mode: Mode = Mode.MIS,
    bounds: Bounds = Bounds.UPPER,
    cap: float = 2.0,
) -> Weights:
    """Weights without the veto. `cap` is C. Raises ValueError unless C >= 1."""
    if not cap >= 1:
        raise ValueError(f"cap {cap} must be >= 1")
    ratios = level_ratios(log_ratios, mask, level).expand_as(log_ratios)
    floor = 1 / cap if bounds is Bounds.TWO_SIDED else 0.0
    match mode:
        case Mode.MIS:
            values, kept = ratios, (ratios <= cap) & (ratios >= floor)
        case Mode.TIS:
            values, kept = ratios.clamp(floor, cap), ~ratios.isnan()
        case Mode.NONE:
            values, kept = ratios, ~ratios.isnan()
        case Mode.UNIT:
            values, kept = torch.ones_like(ratios), torch.ones_like(mask)
    kept = kept & mask
    return Weights(ratios, values.where(kept, 0.0), kept)


def level_ratios(log_ratios: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], level: Level) -> Tensor:
    """w, [N, T] at token level and [N, 1] at the other levels; 1 where there is no model token."""
    own = log_ratios.where(mask, 0.0)
    match level:
        case Level.TOKEN:
            logs = own
        case Level.SEQUENCE:
            logs = own.sum(-1, keepdim=True)
        case Level.GEOMETRIC:
            logs = own.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return logs.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
