"""A training run in this process, without queue and services: the trainer's own step, on samples that are drawn here.

The two sides differ on purpose, from one source or several (`Mismatch`). Shapes: N sequences of a prompt and T tokens,
V vocabulary, H hidden size.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dvp_rl.contract.group import EngineFacts, FinishReason, Group, Sample, VersionSpan
from dvp_rl.contract.job import Sink, job_id
from dvp_rl.contract.sampling import Sampling
from dvp_rl.dvp.sampler import Draw
from dvp_trainer.config import TrainSettings
from dvp_trainer.data.batch import Batch, ScoredGroup
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner

from . import chain
from .decoding import decode, new_cache
from .precision import Format, round_weights
from .rules import Rule

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NOTHING_PRUNED = -1e4
"""log rho so low that nothing is pruned."""
FACTS = EngineFacts(name="lab", version="1", dtype="float32")
RUN_ID = "lab"


@dataclass(frozen=True)
class Mismatch:
    """Deliberate differences of the sampling side. By default there are none, and the sides agree up to rounding."""

    weights: Format | None = None
    kv: Format | None = None
    field: float = 0.0
    """Standard deviation, in nats, of a logit error that is a fixed function of the hidden state."""
    staleness: int = 0
    """Optimizer steps by which its weights lag."""


class Sampler:
    """The sampling policy: a separate model with the trainer's weights, some steps old and rounded."""

    def __init__(self, model: Any, mismatch: Mismatch, rule: Rule) -> None:
        self.mismatch, self.rule = mismatch, rule
        self._model = copy.deepcopy(model).requires_grad_(False)
        self._model.set_attn_implementation("sdpa")  # the trainer's own attention packs sequences
        self._past: deque[dict[str, Tensor]] = deque(maxlen=mismatch.staleness + 1)
        config = model.config
        random = torch.Generator().manual_seed(0)
        self._field = torch.randn(config.hidden_size, config.vocab_size, generator=random)

    def follow(self, model: Any) -> None:
        self._past.append({name: p.detach().clone() for name, p in model.named_parameters()})
        for name, own in self._model.named_parameters():
            own.copy_(self._past[0][name])
        if self.mismatch.weights is not None:
            round_weights(self._model, self.mismatch.weights)

    @torch.inference_mode()
    def draw(self, prompts: Int[Tensor, "N P"], tokens: int, random: torch.Generator) -> Draw:
        """The sampled tokens; every field is [N, T]."""
        cache = new_cache(self.mismatch.kv)

        def next_logits(ids: Tensor) -> Tensor:
            states = self._model.base_model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
            logits: Tensor = self._model.lm_head(states[:, -1]) + self._error(states[:, -1])
            return logits

        uniforms = (torch.rand(len(prompts), generator=random, dtype=torch.float64) for _ in range(tokens))
        return decode(next_logits, prompts, self.rule, uniforms)[0]

    def _error(self, states: Float[Tensor, "N H"]) -> Float[Tensor, "N V"] | float:
        """sqrt(2) s sin(W h), with a fixed W and h scaled to unit mean square. Its standard deviation is s, equal
        contexts have equal errors, and it is not linear, so that the LM head cannot learn it away."""
        if not self.mismatch.field:
            return 0.0
        direction = states / states.square().mean(-1, keepdim=True).sqrt()
        return 2**0.5 * self.mismatch.field * torch.sin(direction @ self._field)


@dataclass(frozen=True)
class Run:
    """The settings of one training run. Iterating over it trains."""

    model: Path
    seed: int
    steps: int
    length: int
    lr: float
    warmup_steps: int = 0
    mismatch: Mismatch = Mismatch()
    train_log_min_p: float = NOTHING_PRUNED
    infer_log_min_p: float = NOTHING_PRUNED
    correction: dict[str, Any] = field(default_factory=dict)
    groups: int = 8
    n: int = 8

    def settings(self) -> TrainSettings:
        sections: dict[str, Any] = {
            "model": {"path": self.model},
            "data": {"train": "dvp_lab.chain:prompts"},
            "reward": {"name": "dvp_lab.chain:rewards"},
            "sampling": {"n": self.n, "log_min_p": self.train_log_min_p, "max_tokens": self.length},
            "correction": self.correction,
            "optimizer": {"lr": self.lr, "warmup_steps": self.warmup_steps},
        }
        return TrainSettings(run_id=RUN_ID, out_dir=Path(), steps=self.steps, seed=self.seed, **sections)

    def __iter__(self) -> Iterator[dict[str, float]]:
        """Trains and yields the metrics of each step."""
        torch.manual_seed(self.seed)
        random = torch.Generator().manual_seed(self.seed)
        learner, sampler = self.sides()
        for step in range(self.steps):
            sampler.follow(learner.model)
            yield learner.step(self._batch(sampler, step, random))

    def sides(self) -> tuple[Learner, Sampler]:
        settings = self.settings()
        learner = Learner(load_model(settings.model), settings, chain.END)
        return learner, Sampler(learner.model, self.mismatch, Rule(self.infer_log_min_p))

    def _batch(self, sampler: Sampler, step: int, random: torch.Generator) -> Batch:
        prompts = chain.prompts(self.groups, random)
        rows = prompts.repeat_interleave(self.n, 0)
        drawn = sampler.draw(rows, self.length, random)
        rewards = chain.rewards(rows, drawn.token_ids).view(self.groups, self.n).tolist()
        samples = _samples(drawn)
        sampling = Sampling(log_min_p=self.infer_log_min_p, max_tokens=self.length)
        staleness = min(step, self.mismatch.staleness)
        groups = []
        for i, prompt in enumerate(prompts.numpy()):
            group = Group(
                job_id=job_id(RUN_ID, step * self.groups + i, 0),
                run_id=RUN_ID,
                prompt_ids=prompt.astype(np.int32),
                sampling=sampling,
                samples=tuple(samples[i * self.n : (i + 1) * self.n]),
                sink=Sink.TRAIN,
                replica_id="lab",
                engine=FACTS,
            )
            groups.append(ScoredGroup(group, tuple(rewards[i]), staleness))
        return Batch(tuple(groups))


def _samples(drawn: Draw) -> list[Sample]:
    T = drawn.token_ids.shape[1]
    arrays = (part.numpy() for part in drawn)
    spans = (VersionSpan(version=f"{RUN_ID}:0:0", start=0, end=T),)
    return [
        Sample(
            token_ids=ids.astype(np.int32),
            logprobs=np.minimum(logprobs, 0),
            kept_mass=mass,
            kept_count=count.astype(np.int32),
            finish_reason=FinishReason.LENGTH,
            versions=spans,
            seed=0,
        )
        for ids, logprobs, mass, count in zip(*arrays, strict=True)
    ]
