"""One batch, one optimizer step (or a few): masked train log-probs, veto, importance weights, gradient, AdamW.

Shapes as in batch.py: G groups of n samples, N = G n sequences; b sequences of a micro-batch, T its longest completion.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from services.dvp.correction import Correction, correct
from services.dvp.denominators import denominator
from services.dvp.metrics import MetricBatch, mismatch_metrics
from services.dvp.objective import surrogate_loss
from services.dvp.policy import Constrained

from .advantages import Baseline, advantages
from .batch import Batch, MicroBatch, TrainSequence, micro_batches
from .config import TrainSettings
from .model import Policy
from .rewards import Overlong

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

logger = logging.getLogger(__name__)

STALENESS_BINS = 8
"""Of the histogram; one more holds all that is older."""


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
        """One [N', T] whole in the order of `rows`; padding is off the mask."""
        T = max(part.mask.shape[1] for part in parts)
        order = torch.cat([part.rows for part in parts]).argsort()

        def whole(name: str) -> Tensor:
            values = [getattr(part, name) for part in parts]
            return torch.cat([v if v.dim() == 1 else pad(v, (0, T - v.shape[1])) for v in values])[order]

        return cls(**{field.name: whole(field.name) for field in fields(cls)})


class Update(NamedTuple):
    """What came of one optimizer step."""

    seen: list[Evidence]
    loss: float
    """The scalar whose negative gradient is the estimator. Its value says little: it is no measure of progress."""
    grad_norm: float | None
    """Before clipping; None if there was nothing to learn from and the weights are unchanged."""


class Learner:
    """The policy in training and its optimizer. `step` is synchronous and heavy: call it in a thread."""

    def __init__(self, model: PreTrainedModel, settings: TrainSettings, pad_id: int) -> None:
        self.model, self.settings, self.pad_id = model, settings, pad_id
        self.device = next(model.parameters()).device
        policy = settings.sampling
        self.policy = Policy(
            model, settings.model.compute_dtype, log_min_p=policy.log_min_p, temperature=policy.temperature
        )
        options = settings.optimizer
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        warmup = max(options.warmup_steps, 1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda done: min(1.0, (done + 1) / warmup))

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    # --- the method -----------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> dict[str, float]:
        """Trains on the batch. Returns its metrics; `optimizer/updates` says how many steps came of it."""
        sequences = batch.sequences_with_signal()
        before = self.look(sequences) if self._needs_first_pass and sequences else None
        A = self.batch_advantages(batch, before)
        parts = batch.split(self.settings.batch.updates)
        updates = [self.update(part.sequences_with_signal(), A, part.num_sequences) for part in parts]
        totals = {
            "optimizer/updates": float(sum(update.grad_norm is not None for update in updates)),
            "grad/norm": max(update.grad_norm or 0.0 for update in updates),
            "loss/surrogate": sum(update.loss for update in updates) / len(updates),
        }
        return totals | self._metrics(batch, A, before, [seen for update in updates for seen in update.seen])

    def update(self, sequences: list[TrainSequence], A: Float[Tensor, " N"], total: int) -> Update:
        """One optimizer step on `sequences`, out of `total` with those that have no signal. The gradient is

            1/D  sum_y  w(y) A(y) grad log pi_train_mp(y | x)

        accumulated over micro-batches and divided by D at the end, when the number of kept sequences is known.
        """
        self.optimizer.zero_grad(set_to_none=True)
        seen, num_kept, loss_sum = [], 0, 0.0
        for micro in self._micro_batches(sequences):
            own = self.train_logprobs(micro)
            evidence = Evidence.of(micro, own)
            correction = self.correct(evidence)
            loss = surrogate_loss(own.logprobs, correction.weights, A[micro.rows], micro.mask, 1.0)
            loss.backward()  # type: ignore[no-untyped-call]
            seen.append(evidence)
            num_kept += int(correction.kept_sequences.sum())
            loss_sum += float(loss.detach())
        if num_kept == 0:
            return Update(seen, 0.0, None)
        D = denominator(self.settings.correction.denominator, total=total, kept=num_kept)
        return Update(seen, loss_sum / D, self._apply(D))

    def train_logprobs(self, micro: MicroBatch) -> TrainLogprobs:
        own: Constrained = self.policy(micro)

        def spread(values: Tensor, padding: float) -> Tensor:
            return torch.full_like(micro.mask, padding, dtype=values.dtype).masked_scatter(micro.mask, values)

        return TrainLogprobs(
            spread(own.logprobs, 0.0), spread(own.kept_mass, 1.0), spread(own.kept_count, 1), spread(own.inside, True)
        )

    def correct(self, evidence: Evidence) -> Correction:
        """Token veto, then importance weights."""
        rule = self.settings.correction
        return correct(
            evidence.train_logprobs,
            evidence.infer_logprobs,
            evidence.inside,
            evidence.mask,
            level=rule.level,
            mode=rule.mode,
            bounds=rule.bounds,
            cap=rule.cap,
            log_veto=-math.inf if rule.veto is None else math.log(rule.veto),
        )

    def batch_advantages(self, batch: Batch, before: Evidence | None) -> Float[Tensor, " N"]:
        """A_i per sequence. Truncated samples get 0 where overlong handling takes them out of the gradient."""
        overlong = self.settings.reward.overlong
        complete = batch.complete()
        weights = torch.ones(batch.num_sequences, dtype=torch.float64)
        if self.settings.correction.baseline is Baseline.RLOO_WEIGHTED and before is not None:
            weights[before.rows.cpu()] = self.correct(before).weights[:, 0].double().cpu()
        A = advantages(
            batch.rewards,
            self.settings.correction.baseline,
            counted=complete if overlong is Overlong.DROP else None,
            weights=weights.view_as(batch.rewards),
        )
        if overlong in (Overlong.MASK, Overlong.DROP):
            A = A.where(complete, 0.0)
        return A.flatten().to(self.device, torch.float32)

    @torch.no_grad()
    def look(self, sequences: list[TrainSequence]) -> Evidence:
        """Both sides' log-probs before anything changes."""
        return Evidence.join([Evidence.of(m, self.train_logprobs(m)) for m in self._micro_batches(sequences)])

    # --- details ----------------------------------------------------------------------------------------------------

    @property
    def _needs_first_pass(self) -> bool:
        """Several steps would mix drift into mismatch, and a weighted baseline needs the weights first."""
        weighted = self.settings.correction.baseline is Baseline.RLOO_WEIGHTED
        return self.settings.batch.updates > 1 or weighted

    def _micro_batches(self, sequences: list[TrainSequence]) -> Iterator[MicroBatch]:
        limit = self.settings.model.micro_batch_tokens
        return micro_batches(sequences, max_tokens=limit, pad_id=self.pad_id, device=self.device)

    def _apply(self, D: int) -> float | None:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.div_(D)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.settings.optimizer.max_grad_norm))
        if not math.isfinite(norm):
            logger.error("gradient norm is %s: this step is skipped and the weights stay as they are", norm)
            return None
        self.optimizer.step()
        self.schedule.step()
        return norm

    def _metrics(
        self, batch: Batch, A: Float[Tensor, " N"], before: Evidence | None, seen: list[Evidence]
    ) -> dict[str, float]:
        """Mismatch is measured before the first update; what further updates add is drift, and logged apart."""
        metrics = batch_metrics(batch) | {"optimizer/lr": float(self.schedule.get_last_lr()[0])}
        if not seen:
            return metrics
        during = Evidence.join(seen)
        first = before or during
        rewards = batch.rewards.flatten().to(self.device)
        metrics |= mismatch_metrics(
            MetricBatch(
                **{field.name: getattr(first, field.name) for field in fields(first) if field.name != "rows"},
                advantages=A[first.rows],
                rewards=rewards[first.rows],
                correction=self.correct(first),
                level=self.settings.correction.level,
                cap=self.settings.correction.cap,
            )
        )
        metrics |= pruning_metrics(first)
        if before is not None:
            drift = (before.train_logprobs - during.train_logprobs)[before.mask & before.inside & during.inside]
            metrics["drift/kl"] = float(drift.mean()) if drift.numel() else 0.0
        return metrics


def pruning_metrics(evidence: Evidence) -> dict[str, float]:
    """What pruning removed. The unmasked log-prob is the masked one plus log Z, so both can stand side by side."""
    mask, inside = evidence.mask, evidence.mask & evidence.inside
    masked = evidence.train_logprobs - evidence.infer_logprobs
    unmasked = masked + (evidence.train_kept_mass / evidence.infer_kept_mass).log()
    return {
        # Pruning counts as at work where it takes at least a thousandth of the probability.
        "pruned/share": float((evidence.infer_kept_mass[mask] <= 0.999).double().mean()),
        "pruned/mass": float((1 - evidence.infer_kept_mass[mask]).double().mean()),
        "mismatch/kl_unmasked": float(-unmasked[inside].double().mean()) if inside.any() else 0.0,
        # Monte Carlo over the engine's own samples.
        "entropy/constrained": float(-evidence.infer_logprobs[mask].double().mean()),
    }


def batch_metrics(batch: Batch) -> dict[str, float]:
    rewards, staleness = batch.rewards, torch.tensor([scored.staleness for scored in batch.groups]).double()
    histogram = Counter(min(scored.staleness, STALENESS_BINS) for scored in batch.groups)
    lengths = [len(sample.token_ids) for scored in batch.groups for sample in scored.group.samples]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(1, unbiased=False).mean()),
        "reward/failed": float(sum(scored.num_failed for scored in batch.groups)),
        "groups/no_signal": float(sum(not scored.has_signal for scored in batch.groups)),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
        **{f"staleness/groups_{behind}": float(count) for behind, count in sorted(histogram.items())},
        "length/mean": sum(lengths) / len(lengths),
        "length/max": float(max(lengths)),
        "length/truncated_share": float((~batch.complete()).double().mean()),
        "time/generate_s": sum(scored.group.generate_s for scored in batch.groups) / len(batch.groups),
        "time/reward_s": sum(scored.reward_s for scored in batch.groups),
    }
