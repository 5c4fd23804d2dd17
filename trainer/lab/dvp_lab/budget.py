"""The reward after a fixed training budget under a rule, on the lab's small task; both sides prune by the rule."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from dvp_rl.dvp.policy import Constrained, constrained_logprobs
from dvp_trainer.learn.layout import Layout
from dvp_trainer.learn.model import Policy
from dvp_trainer.learn.step import Learner

from . import chain
from .cells import run_cells
from .mismatch import Estimate, ratio
from .precision import Format
from .rules import Rule
from .subject import Progress
from .training import NOTHING_PRUNED, Mismatch, Run, Sampler

TEACHING_STEPS = 400
LENGTH, RATE = 32, 1e-3
WINDOW = 10
"""Number of final steps whose mean reward counts."""
TRAINING = "training the lab's small model under every rule"
MISMATCH = Mismatch(weights=Format.FP8, kv=Format.FP8)


@dataclass(frozen=True)
class Budget:
    folder: Path
    """Folder of the task's model and of the runs; a run found there is not repeated."""
    steps: int = 40
    seeds: tuple[int, ...] = (1, 2, 3)
    jobs: int = 1


class RuledPolicy(Policy):
    """The trainer's policy under a rule that depends on the logits, which it therefore computes in full."""

    def __init__(self, model: Any, rule: Rule) -> None:
        model.set_attn_implementation("sdpa")
        super().__init__(model, "float32", log_min_p=rule.log_min_p, temperature=1.0)
        self._rule = rule

    def forward(self, layout: Layout, token_ids: torch.Tensor | None) -> Constrained | torch.Tensor:
        if token_ids is None:
            return super().forward(layout, None)
        states = self.model.base_model(**layout.model_inputs(), use_cache=False).last_hidden_state
        logits = self.model.get_output_embeddings()(states.flatten(0, 1).index_select(0, layout.before))
        return constrained_logprobs(logits, token_ids, log_min_p=self._rule(logits.detach()), temperature=1.0)


@dataclass(frozen=True)
class RuledRun(Run):
    slope: float = 0.0

    def sides(self) -> tuple[Learner, Sampler]:
        learner, sampler = super().sides()
        if self.slope:
            sampler.rule = Rule(self.infer_log_min_p, self.slope)
            learner.policy = RuledPolicy(learner.model, sampler.rule)
        return learner, sampler


def rewards(rules: Sequence[Rule], budget: Budget, progress: Progress) -> dict[Rule, Estimate]:
    """The mean training reward at the end of the budget, over seeds, for each rule."""
    model = budget.folder / "model"
    if not model.is_dir():
        budget.folder.mkdir(parents=True, exist_ok=True)
        progress(0, 1, "warm-starting the model of the training task")
        chain.teach(model, TEACHING_STEPS)
    runs = {
        f"rule-{number}-seed-{seed}": _run(model, rule, budget.steps, seed)
        for number, rule in enumerate(rules)
        for seed in budget.seeds
    }
    ends = dict[str, float]()
    # spawn, not fork: PyTorch's threads do not survive a fork.
    with ProcessPoolExecutor(budget.jobs, mp_context=get_context("spawn")) as pool:
        progress(0, len(runs), TRAINING)
        for name, outcome in run_cells(runs, budget.folder, pool):
            ends[name] = outcome.mean("reward/mean", budget.steps - WINDOW)
            progress(len(ends), len(runs), TRAINING)
    found = {}
    for number, rule in enumerate(rules):
        own = torch.tensor([ends[f"rule-{number}-seed-{seed}"] for seed in budget.seeds], dtype=torch.float64)
        found[rule] = ratio(own, torch.ones_like(own))
    return found


def _run(model: Path, rule: Rule, steps: int, seed: int) -> RuledRun:
    log_min_p = max(rule.log_min_p, NOTHING_PRUNED)
    return RuledRun(
        model,
        seed,
        steps,
        LENGTH,
        RATE,
        mismatch=MISMATCH,
        train_log_min_p=log_min_p,
        infer_log_min_p=log_min_p,
        slope=rule.slope,
    )
