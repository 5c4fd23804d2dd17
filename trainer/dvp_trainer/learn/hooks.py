"""The method's objective, and a user's advantages and objective (trainer/HOOKS.md), whose results are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from dvp_rl.contract.errors import ConfigError
from dvp_rl.dvp.correction import Correction
from dvp_rl.dvp.evidence import Evidence
from dvp_rl.dvp.objective import surrogate_loss
from dvp_rl.hooks import call_hook, load_hook

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

BASELINE, OBJECTIVE = "correction.baseline", "correction.objective"


class Advantages(Protocol):
    """A user's advantages. A sample that is not `counted` must not affect the others' and gets 0."""

    def __call__(self, rewards: Float[Tensor, "G n"], *, counted: Bool[Tensor, "G n"]) -> Float[Tensor, "G n"]: ...


class Objective(Protocol):
    """The scalar that is minimised: a SUM over the tokens of some sequences, which the trainer divides by D.

    `train_logprobs` carries the gradient; `seen` holds the same sequences without gradient.
    """

    def __call__(
        self,
        train_logprobs: Float[Tensor, "N T"],
        seen: Evidence,
        correction: Correction,
        advantages: Float[Tensor, " N"],
    ) -> Float[Tensor, ""]: ...


def estimator(
    train_logprobs: Float[Tensor, "N T"], seen: Evidence, correction: Correction, advantages: Float[Tensor, " N"]
) -> Float[Tensor, ""]:
    """The objective of Theorem 5.3."""
    return surrogate_loss(train_logprobs, correction.weights, advantages, seen.mask, 1.0)


def own_advantages(name: str) -> Advantages:
    """The user's function with a checked result. Raises ConfigError if there is no such function; a call raises it
    unless the result is a [G, n] tensor of finite numbers."""
    function: Advantages = load_hook(BASELINE, name)

    def checked(rewards: Tensor, *, counted: Tensor) -> Tensor:
        A = call_hook(BASELINE, function, rewards, counted=counted)
        if not isinstance(A, Tensor) or A.shape != rewards.shape:
            raise ConfigError(f"{BASELINE} {name!r} returned {_shown(A)}, expected {_shown(rewards)}")
        A = A.detach().to(rewards).where(counted, 0.0)
        if not A.isfinite().all():
            raise ConfigError(f"{BASELINE} {name!r} returned NaN or an infinity for a counted sample")
        return A

    return checked


def own_objective(name: str) -> Objective:
    """The user's function with a checked result. Raises ConfigError if there is no such function; a call raises it
    unless the result is a scalar tensor with a gradient."""
    function: Objective = load_hook(OBJECTIVE, name)

    def checked(train_logprobs: Tensor, seen: Evidence, correction: Correction, advantages: Tensor) -> Tensor:
        loss = call_hook(OBJECTIVE, function, train_logprobs, seen, correction, advantages)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise ConfigError(
                f"{OBJECTIVE} {name!r} returned {_shown(loss)}, expected a tensor of shape [] that depends on "
                "train_logprobs"
            )
        return loss

    return checked


def _shown(value: object) -> str:
    return (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"an object of type {type(value).__name__}"
    )
