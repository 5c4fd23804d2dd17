"""What both sides say of the tokens of a batch, without gradient."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from .micro_batch import MicroBatch
from .world import World

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


class TrainLogprobs(NamedTuple):
    """What the trainer's own model says of a micro-batch, padded back to [b, T]."""

    logprobs: Float[Tensor, "b T"]
    """log pi_train_mp, the only one with a gradient; 0 where padded."""
    kept_mass: Float[Tensor, "b T"]
    kept_count: Int[Tensor, "b T"]
    inside: Bool[Tensor, "b T"]


@dataclass(frozen=True)
class Evidence:
    """Both sides of some sequences, without gradient: what weights and metrics are computed from."""

    rows: Int[Tensor, " b"]
    mask: Bool[Tensor, "b T"]
    train_logprobs: Float[Tensor, "b T"]
    infer_logprobs: Float[Tensor, "b T"]
    inside: Bool[Tensor, "b T"]
    train_kept_mass: Float[Tensor, "b T"]
    train_kept_count: Int[Tensor, "b T"]
    infer_kept_mass: Float[Tensor, "b T"]
    infer_kept_count: Int[Tensor, "b T"]

    @classmethod
    def of(cls, micro: MicroBatch, own: TrainLogprobs) -> Evidence:
        infer = micro.infer_logprobs, micro.infer_kept_mass, micro.infer_kept_count
        train = own.logprobs.detach(), own.kept_mass, own.kept_count
        return cls(micro.rows, micro.mask, train[0], infer[0], own.inside, train[1], train[2], infer[1], infer[2])

    @classmethod
    def join(cls, parts: list[Evidence]) -> Evidence:
        """One [N', T] whole in the order of `rows`; padding is off the mask, rows without tokens are left out."""
        T = max(part.mask.shape[1] for part in parts)
        used = torch.cat([part.mask.any(1) for part in parts])
        order = torch.cat([part.rows for part in parts])[used].argsort()

        def whole(name: str) -> Tensor:
            values = [getattr(part, name) for part in parts]
            return torch.cat([v if v.dim() == 1 else pad(v, (0, T - v.shape[1])) for v in values])[used][order]

        return cls(**{field.name: whole(field.name) for field in fields(cls)})

    @classmethod
    def gather(cls, parts: list[Evidence], world: World) -> Evidence | None:
        """The parts of all ranks; None if there are none. No rank has parts, or every one has."""
        if not parts:
            return None
        own = cls.join(parts)
        values = zip(*(world.gather(getattr(own, field.name)) for field in fields(cls)), strict=True)
        return cls.join([cls(*of_rank) for of_rank in values]) if world.size > 1 else own


def pruning_metrics(evidence: Evidence) -> dict[str, float]:
    """What pruning removed, by both sides' log-probs of the same tokens with it and without: log pi = log pi_mp + log Z
    of a token inside. A mean over nothing is absent."""
    mask, inside = evidence.mask, evidence.mask & evidence.inside
    mass = evidence.infer_kept_mass[mask].double()
    metrics = {
        # Pruning counts as at work where it takes at least a thousandth of the probability.
        "pruned/share": float((mass <= 0.999).double().mean()),
        "pruned/mass": float((1 - mass).mean()),
        # Monte Carlo over the engine's own samples.
        "entropy/constrained": float(-evidence.infer_logprobs[mask].double().mean()),
    }
    if not inside.any():
        return metrics
    sides = {
        "train": (evidence.train_logprobs, evidence.train_kept_mass),
        "infer": (evidence.infer_logprobs, evidence.infer_kept_mass),
    }
    for side, (logprobs, kept_mass) in sides.items():
        constrained = logprobs[inside].double()
        metrics[f"logprob/{side}_constrained"] = float(constrained.mean())
        metrics[f"logprob/{side}_full"] = float((constrained + kept_mass[inside].double().log()).mean())
    return metrics | {"mismatch/kl_unmasked": metrics["logprob/infer_full"] - metrics["logprob/train_full"]}
