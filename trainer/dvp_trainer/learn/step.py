"""One batch, one optimizer step (or a few): masked train log-probs, veto, importance weights, gradient, AdamW.

Shapes as in batch.py and micro_batch.py: G groups of n episodes, N = G n rows; b rows of a micro-batch, T model tokens
of its longest row.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import PreTrainedModel

from dvp_rl.contract.metrics import COUNTED, MAX_METRICS, mean_of
from dvp_rl.contract.shape import Shape
from dvp_rl.dvp.advantages import advantages
from dvp_rl.dvp.correction import Correction, correct
from dvp_rl.dvp.denominators import denominator
from dvp_rl.dvp.evidence import Evidence
from dvp_rl.dvp.metrics import MetricBatch, mismatch_metrics
from dvp_rl.dvp.options import Baseline
from dvp_rl.dvp.policy import Constrained
from dvp_rl.hooks import is_hook
from dvp_rl.weights.folder import folder_digest
from dvp_trainer.config import OptimizerSection, TrainSettings
from dvp_trainer.data.batch import Batch, Episode
from dvp_trainer.options import Overlong

from .arrangement import Beside
from .canary import CanaryMaker
from .hooks import estimator, own_advantages, own_objective
from .lora import add_lora
from .micro_batch import MicroBatch, micro_batches, share
from .model import Policy, check_rope, full, load_model, shard
from .state import load_state, save_state
from .weight_files import write_adapter, write_weights
from .world import Order, World

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

logger = logging.getLogger(__name__)

STALENESS_BINS = 8
"""Number of bins of the staleness histogram; one more bin holds everything older."""


class Update(NamedTuple):
    """Result of one optimizer step."""

    seen: Evidence | None
    loss: float
    """Scalar whose negative gradient is the estimator. Its value is no measure of progress."""
    grad_norm: float | None
    """Gradient norm before clipping. None if the weights are unchanged: nothing was kept, or the norm is not finite."""


def open_learner(settings: TrainSettings, pad_id: int, world: World) -> Learner:
    """The learner for model.path. A rank loads the whole model and shards it before the next rank loads it."""
    with world.in_turn():
        return Learner(load_model(settings.model, sharded=world.size > 1), settings, pad_id, world)


def adamw(model: PreTrainedModel, options: OptimizerSection, device: torch.device) -> torch.optim.AdamW:
    """An optimizer of the parameters that are trained."""
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=device.type == "cuda" or None,  # without temporary copies of all weights
    )


class Learner:
    """The policy in training and its optimizer. `step` is synchronous and heavy: call it in a thread."""

    def __init__(
        self, model: PreTrainedModel, settings: TrainSettings, pad_id: int, world: World | None = None
    ) -> None:
        self.model, self.settings, self.pad_id, self.world = model, settings, pad_id, world or World()
        self.device = torch.device(settings.model.device)
        check_rope(model, settings)
        if settings.lora.rank:
            add_lora(model, settings.lora, settings.seed)
        policy, shape = settings.sampling, settings.model.fixed_shape
        self.policy = Policy(
            model,
            settings.model.compute_dtype,
            log_min_p=policy.log_min_p,
            temperature=policy.temperature,
            shape=None if shape is None else Shape.parse(shape),
            fp32_head=settings.model.fp32_head,
        )
        if self.world.size > 1:
            shard(self.policy, self.device, self.world)
        self._canary = CanaryMaker(self.policy, settings, pad_id, self.world) if settings.weights.canary else None
        self.optimizer = adamw(model, settings.optimizer, self.device)
        baseline, objective = settings.correction.baseline, settings.correction.objective
        self._advantages = own_advantages(baseline) if is_hook(baseline) else None
        self._objective = estimator if objective is None else own_objective(objective)
        self.optimizer_steps = 0
        self.evidence: Evidence | None = None
        """Both sides' log-probs of the last batch before its first update; None if no group had a signal."""
        self.update_evidence: Evidence | None = None
        """The same at each sequence's own update, which decided what was kept."""
        self.advantages: Float[Tensor, " N"] = torch.empty(0)
        """Of the last batch."""

    @cached_property
    def base_digest(self) -> str:
        """Digest of the folder that training starts from."""
        return folder_digest(self.settings.model.path)

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step: rises linearly during warm-up, then stays constant."""
        options = self.settings.optimizer
        return options.lr * min(1.0, (self.optimizer_steps + 1) / max(options.warmup_steps, 1))

    def obey(self, order: Order) -> None:
        """Runs an order of the leader on this rank."""
        match order.name:
            case "step":
                self.step(Batch.from_bytes(order.payload))
            case "write_weights":
                self.write_weights(Path(order.payload.decode()))
            case "save":
                self.save(Path(order.payload.decode()))
            case "load":
                self.load(Path(order.payload.decode()))

    def write_weights(self, folder: Path) -> None:
        """Writes the current weights or adapter as safetensors. Raises OSError (disk full)."""
        self.world.order(Order("write_weights", bytes(folder)))
        if self.settings.lora.publish == "adapter":
            write_adapter(self.model, folder, self.base_digest, self.world)
        else:
            write_weights(self.model, folder, getattr(torch, self.settings.weights.dtype), self.world)
        if self._canary is not None:
            self._canary.write(folder)

    def save(self, folder: Path) -> None:
        """Saves everything that the next step depends on, except the settings. Durable on return."""
        self.world.order(Order("save", bytes(folder)))
        save_state(folder, self.model, self.optimizer, self.optimizer_steps)

    def load(self, folder: Path) -> None:
        """Loads what `save` wrote, with the same or another number of ranks."""
        self.world.order(Order("load", bytes(folder)))
        self.optimizer_steps = load_state(folder, self.model, self.optimizer)

    # --- the method -----------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> dict[str, float]:
        """Trains on the batch and returns its metrics; `optimizer/updates` is the number of optimizer steps made.

        With several ranks, every rank calls this with the same batch, trains its share and returns the same metrics.
        """
        if self.world.size > 1:
            self.world.order(Order("step", batch.to_bytes()))
        episodes = self.episodes(batch)
        before = self.look(episodes) if self._needs_first_pass else None
        self.advantages = A = self.batch_advantages(batch, before)
        parts = batch.split(self.settings.batch.updates)
        updates = [self.update(self.episodes(part), A, part.num_episodes) for part in parts]
        totals = {
            "optimizer/updates": float(sum(update.grad_norm is not None for update in updates)),
            "grad/norm": max(update.grad_norm or 0.0 for update in updates),
            "loss/surrogate": sum(update.loss for update in updates) / len(updates),
        }
        return totals | self._metrics(batch, A, before, [update.seen for update in updates if update.seen is not None])

    def update(self, episodes: list[Episode], A: Float[Tensor, " N"], total: int) -> Update:
        """One optimizer step on `episodes`. `total` counts those without signal too. The gradient is

            1/D  sum_y  w(y) A(y) grad log pi_train_mp(y | x)

        accumulated over micro-batches and ranks, divided by D at the end, when the number of kept episodes is known.
        """
        self.optimizer.zero_grad(set_to_none=True)
        seen, num_kept, num_corrected, loss_sum = [], 0.0, 0.0, 0.0
        for micro in self._micro_batches(episodes):
            in_parts = len(micro.layouts) > 1
            with torch.set_grad_enabled(not in_parts):
                own = self.train_logprobs(micro)
            own.logprobs.requires_grad_()
            evidence = _evidence(micro, own)
            correction = self.correct(evidence)
            loss = self._objective(own.logprobs, evidence, correction, A[micro.rows])
            loss.backward()  # type: ignore[no-untyped-call]
            if in_parts:
                self._backward_in_parts(micro, own.logprobs)
            seen.append(evidence)
            num_kept += float((correction.kept_sequences & micro.mask.any(1)).sum())
            num_corrected += float(micro.mask.any(1).sum())
            loss_sum += float(loss.detach())
        whole = self._whole(seen)
        num_kept, num_corrected, loss_sum = self.world.sum(num_kept, num_corrected, loss_sum)
        if num_kept == 0:
            return Update(whole, 0.0, None)
        policy = self.settings.correction.denominator
        D = denominator(policy, total=total, corrected=int(num_corrected), kept=int(num_kept))
        return Update(whole, loss_sum / D, self._apply(D))

    def episodes(self, batch: Batch) -> list[Episode]:
        """The batch's episodes that can have a gradient. Groups without signal are left out only with the method's own
        advantages and objective: a user's may give them a gradient."""
        own = self._advantages is not None or self._objective is not estimator
        return batch.episodes(without_signal=own)

    def train_logprobs(self, micro: MicroBatch) -> Constrained:
        """The trainer's log-probs of a micro-batch, padded back to [b, T]."""
        own = self.policy.read(micro)

        def spread(values: Tensor, padding: float) -> Tensor:
            return torch.full_like(micro.mask, padding, dtype=values.dtype).masked_scatter(micro.mask, values)

        return Constrained(*(spread(values, padding) for values, padding in zip(own, (0.0, 1.0, 1, True), strict=True)))

    def correct(self, evidence: Evidence) -> Correction:
        """Token veto, then importance weights."""
        rule = self.settings.correction
        return correct(
            evidence.train.logprobs,
            evidence.infer.logprobs,
            evidence.train.inside,
            evidence.mask,
            level=rule.level,
            mode=rule.mode,
            bounds=rule.bounds,
            cap=rule.cap,
            log_veto=-math.inf if rule.veto is None else math.log(rule.veto),
        )

    def batch_advantages(self, batch: Batch, before: Evidence | None) -> Float[Tensor, " N"]:
        """A_i per episode. Truncated ones get 0 if reward.overlong is `mask` or `drop`."""
        overlong = self.settings.reward.overlong
        complete = batch.complete()
        weights = torch.ones(batch.num_episodes, dtype=torch.float64)
        if self.settings.correction.baseline is Baseline.RLOO_WEIGHTED and before is not None:
            # One weight per episode: the mean over its tokens, where a rejected token counts as 0.
            per_token = self.correct(before).weights.double().sum(1) / before.mask.sum(1).clamp(min=1)
            weights[before.rows.cpu()] = per_token.cpu()
        counted = complete if overlong is Overlong.DROP else torch.ones_like(complete)
        if self._advantages is not None:
            A = self._advantages(batch.rewards, counted=counted)
        else:
            baseline = Baseline(self.settings.correction.baseline)
            A = advantages(batch.rewards, baseline, counted=counted, weights=weights.view_as(batch.rewards))
        if overlong in (Overlong.MASK, Overlong.DROP):
            A = A.where(complete, 0.0)
        return A.flatten().to(self.device, torch.float32)

    @torch.no_grad()
    def look(self, episodes: list[Episode]) -> Evidence | None:
        """Both sides' log-probs under the current weights; None if there are no episodes."""
        parts = [_evidence(micro, self.train_logprobs(micro)) for micro in self._micro_batches(episodes)]
        return self._whole(parts)

    # --- details ----------------------------------------------------------------------------------------------------

    @property
    def _needs_first_pass(self) -> bool:
        """Whether log-probs are needed before the updates: several updates would mix drift into the mismatch, and a
        weighted baseline needs the weights first."""
        weighted = self.settings.correction.baseline is Baseline.RLOO_WEIGHTED
        return self.settings.batch.updates > 1 or weighted

    def _backward_in_parts(self, micro: MicroBatch, logprobs: Float[Tensor, "b T"]) -> None:
        """Carries the gradient of log-probs that were computed without a graph on to the weights. Each forward is
        repeated and followed by its backward, so that memory holds the graph of one at a time."""
        assert logprobs.grad is not None
        for each, slopes in zip(micro.forwards(), micro.per_forward(logprobs.grad), strict=True):
            self.policy(*each).logprobs.backward(slopes)

    def _micro_batches(self, episodes: list[Episode]) -> list[MicroBatch]:
        """This rank's share. Ranks with fewer forwards than others get idle ones, because all ranks must gather sharded
        parameters together."""
        world, beside = self.world, self.policy.arrangement.beside
        # Padded episodes are sorted by length, to save padding; packed ones stay in order, prompt by prompt.
        ordered = episodes if beside is Beside.PACKED else sorted(episodes, key=lambda e: -e.num_tokens)
        limit = self.policy.limit(self.settings.model.micro_batch_tokens)
        cut = partial(micro_batches, limit=limit, pad_id=self.pad_id, device=self.device)
        mine = list(cut(share(ordered, world.rank, world.size)))
        mine += [next(cut(episodes[:1])).idle() for _ in range(world.max(len(mine)) - len(mine))]
        return [micro.in_forwards(world.max(len(micro.layouts))) for micro in mine]

    def _whole(self, parts: list[Evidence]) -> Evidence | None:
        """The joined parts of all ranks; None if there are none. Either all ranks have parts or none has."""
        if not parts:
            return None
        own = Evidence.join(parts)
        if self.world.size == 1:
            return own
        ranks = {name: self.world.gather(tensor) for name, tensor in own.tensors().items()}
        return Evidence.join(
            [Evidence.of({name: of_rank[rank] for name, of_rank in ranks.items()}) for rank in range(self.world.size)]
        )

    def _apply(self, D: float) -> float | None:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.div_(D / self.world.size)  # FSDP averages gradients over ranks
        norm = float(full(torch.nn.utils.clip_grad_norm_(parameters, self.settings.optimizer.max_grad_norm)))
        if not math.isfinite(norm):
            logger.error("gradient norm is %s: this step is skipped and the weights stay as they are", norm)
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        self.optimizer.step()
        self.optimizer_steps += 1
        return norm

    def _metrics(
        self, batch: Batch, A: Float[Tensor, " N"], before: Evidence | None, seen: list[Evidence]
    ) -> dict[str, float]:
        """Metrics of the batch. Mismatch is measured before the first update; later drift is logged separately."""
        metrics = batch_metrics(batch) | {"optimizer/lr": self.lr}
        self.evidence = self.update_evidence = None
        if not seen:
            return metrics
        self.update_evidence = during = Evidence.join(seen)
        self.evidence = first = before or during
        rewards = batch.rewards.flatten().to(self.device)
        metrics |= mismatch_metrics(
            MetricBatch(
                seen=first,
                advantages=A[first.rows],
                rewards=rewards[first.rows],
                correction=self.correct(first),
                level=self.settings.correction.level,
                cap=self.settings.correction.cap,
            )
        )
        if before is not None:
            drift = (before.train.logprobs - during.train.logprobs)[
                before.mask & before.train.inside & during.train.inside
            ]
            metrics["drift/kl"] = float(drift.mean()) if drift.numel() else 0.0
        return metrics


def _evidence(micro: MicroBatch, own: Constrained) -> Evidence:
    return Evidence(micro.rows, micro.mask, own._replace(logprobs=own.logprobs.detach()), micro.infer)


def _played(batch: Batch) -> dict[str, float]:
    """Metrics of episodes that a harness played, if there are any: those that most of them have."""
    counted = [metrics for scored in batch.groups for metrics in scored.group.metrics]
    if not counted:
        return {}
    names = Counter(name for metrics in counted for name in metrics).most_common(MAX_METRICS + len(COUNTED))
    samples = [sample for scored in batch.groups for sample in scored.group.samples]
    num_environment = sum(len(sample.token_ids) - sample.num_model_tokens for sample in samples)
    return {"length/environment_mean": num_environment / batch.num_episodes} | {
        mean_of(name): fmean(metrics[name] for metrics in counted if name in metrics) for name, _ in names
    }


def batch_metrics(batch: Batch) -> dict[str, float]:
    rewards, staleness = batch.rewards, torch.tensor([scored.staleness for scored in batch.groups]).double()
    histogram = Counter(min(scored.staleness, STALENESS_BINS) for scored in batch.groups)
    episodes = [samples for scored in batch.groups for samples in scored.group.episodes]
    lengths = [sum(sample.num_model_tokens for sample in samples) for samples in episodes]
    return _played(batch) | {
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
