"""The scalar whose negative gradient is the estimator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def surrogate_loss(
    train_logprobs: Float[Tensor, "N T"],
    weights: Float[Tensor, "N T"],
    advantages: Float[Tensor, " N"],
    mask: Bool[Tensor, "N T"],
    denominator: float,
) -> Float[Tensor, ""]:
    """-(1/D) sum_y A(y) sum_t w_t log pi_train_mp(y_t), summed over tokens, without 1/T.

    With w_t = w(y) its negative gradient is the mean of g = w A grad log pi_train_mp(y) (Thm 5.3). Weights and
    advantages are constants. Tokens with weight 0 or off the mask may hold NaN. The losses of micro-batches add up if
    each is given the whole batch's denominator. Raises ValueError unless the denominator is > 0.
    """
    if not denominator > 0:
        raise ValueError(f"denominator {denominator} must be > 0: skip the step if nothing was kept")
    active = mask & (weights != 0)
    slopes = (weights * advantages.unsqueeze(-1)).detach().where(active, 0.0)
    return -(slopes * train_logprobs.where(active, 0.0)).sum() / denominator
