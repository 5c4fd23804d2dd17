"""What a run has reached, from the files in its out_dir."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dvp_rl.contract.metrics import TOOL_ERRORS, TURNS, mean_of

ENDS = 5
"""Steps at each end of the run over which its first and last reward are averaged."""
CORRECT = "heldout/pass_at_1"
"""Share of correct samples; `_from_` and evaluate.correct_from follow unless that is 1."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures of a run. Means are over all steps, first and last ones over the ENDS steps at that end of the run; None
    without a value to take them from."""

    steps: int
    reward_first: float | None
    reward_last: float | None
    heldout_first: float | None
    """The first score, no mean; usually from before the first step."""
    heldout_last: float | None
    heldout_best: float | None
    heldout_best_step: int | None
    """The first step with that score."""
    heldout_best_stderr: float | None
    """Its standard error, were the prompts drawn anew."""
    heldout_best_correct: float | None
    """Share of correct samples at that step: rewards of evaluate.correct_from and more."""
    turns_first: float | None
    """Turns per episode, of those that a harness played."""
    turns_last: float | None
    tool_errors_first: float | None
    """Failed calls of tools per episode."""
    tool_errors_last: float | None
    pruned_share: float | None
    """Share of positions at which pruning took at least a thousandth of the probability."""
    kl: float | None
    """Mismatch KL(infer || train) per token."""
    largest_log_ratio: float | None
    """Largest |log pi_train - log pi_infer| of all tokens."""
    veto: float | None
    """Share of sequences vetoed."""
    mis: float | None
    """Share of sequences over the MIS bound."""
    samples_per_second: float | None
    """Throughput of training, with evaluation but without start-up."""


def outcome(metrics: Sequence[Mapping[str, Any]]) -> Outcome:
    """`metrics`: one record per step, as in metrics.jsonl."""
    rewards, turns = values(metrics, "reward/mean"), values(metrics, mean_of(TURNS))
    tool_errors = values(metrics, mean_of(TOOL_ERRORS))
    scored = [record for record in metrics if record.get("heldout/score") is not None]
    best: Mapping[str, Any] = max(scored, key=lambda record: record["heldout/score"], default={})
    ratios = values(metrics, "mismatch/ratio_min") + values(metrics, "mismatch/ratio_max")
    timed = [record for record in metrics if {"time/step_s", "throughput/samples_per_second"} <= record.keys()]
    seconds = sum(record["time/step_s"] for record in timed)
    samples = sum(record["time/step_s"] * record["throughput/samples_per_second"] for record in timed)
    return Outcome(
        steps=metrics[-1]["step"] if metrics else 0,
        reward_first=mean(rewards[:ENDS]),
        reward_last=mean(rewards[-ENDS:]),
        heldout_first=scored[0]["heldout/score"] if scored else None,
        heldout_last=scored[-1]["heldout/score"] if scored else None,
        heldout_best=best.get("heldout/score"),
        heldout_best_step=best.get("step"),
        heldout_best_stderr=best.get("heldout/stderr"),
        heldout_best_correct=next((best[key] for key in best if key.split("_from_")[0] == CORRECT), None),
        turns_first=mean(turns[:ENDS]),
        turns_last=mean(turns[-ENDS:]),
        tool_errors_first=mean(tool_errors[:ENDS]),
        tool_errors_last=mean(tool_errors[-ENDS:]),
        pruned_share=mean(values(metrics, "pruned/share")),
        kl=mean(values(metrics, "mismatch/kl")),
        largest_log_ratio=max((abs(math.log(ratio)) if ratio else math.inf for ratio in ratios), default=None),
        veto=mean(values(metrics, "veto/total")),
        mis=mean(values(metrics, "mis/fraction")),
        samples_per_second=samples / seconds if seconds else None,
    )


def values(metrics: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [record[key] for record in metrics if record.get(key) is not None]


def mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
