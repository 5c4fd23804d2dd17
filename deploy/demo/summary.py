"""Summary of a run: pure functions from the records it left behind to its figures and faults."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.table import Table

from dvp_rl.contract.weights import WeightVersion

ENDS = 5
"""Steps at each end of the run over which its first and last reward are averaged."""
MIN_PRUNED = 0.05
"""Least share of positions that must prune for a run to demonstrate DVP."""


class Books(NamedTuple):
    lost: tuple[str, ...]
    duplicated: tuple[str, ...]


def reconcile(submitted: Iterable[str], consumed: Iterable[str], awaited: Iterable[str] = ()) -> Books:
    """Compares the submitted jobs with what became of them.

    Every submitted job must have ended once or still be awaited (generated ahead when the run ended). `lost` jobs did
    neither. `duplicated` jobs ended more often than submitted: twice, or without having been submitted.
    """
    asked = Counter(set(submitted))
    ended = Counter(consumed) + Counter(awaited)
    return Books(tuple(sorted((asked - ended).elements())), tuple(sorted((ended - asked).elements())))


class Replica(NamedTuple):
    id: str
    last_version: str
    """The version served at the end; "" if the replica did not say."""

    @property
    def seq(self) -> int:
        """Sequence number of the version: 0 for the initial folder or no answer, above 0 for weights of the trainer."""
        return WeightVersion.parse(self.last_version).seq if self.last_version else 0


@dataclass(frozen=True)
class Summary:
    """Contents of summary.json. Means are over all steps unless stated otherwise."""

    seed: int
    steps: int
    reward_first: float
    """Mean over the first ENDS steps."""
    reward_last: float
    heldout_first: float | None
    """Score before the first step."""
    heldout_last: float | None
    log_min_p: float
    pruned_share: float
    """Share of positions at which pruning took at least a thousandth of the probability."""
    kl: float
    """Mismatch KL(infer || train) per token."""
    largest_log_ratio: float
    """Largest |log pi_train - log pi_infer| of all tokens."""
    veto: float
    """Share of sequences vetoed."""
    mis: float
    """Share of sequences over the MIS bound."""
    samples_trained: int
    versions_published: int
    replicas: tuple[Replica, ...]
    samples_per_second: float
    """Throughput of training, with evaluation but without start-up."""
    lost: int
    duplicated: int
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"replicas": [replica._asdict() for replica in self.replicas]}


def summarize(
    metrics: Sequence[Mapping[str, Any]],
    progress: Mapping[str, Any],
    books: Books,
    replicas: Sequence[Replica],
    *,
    seed: int,
    log_min_p: float,
    wall_s: float,
) -> Summary:
    """`metrics`: one record per step, as in metrics.jsonl; `progress`: the newest checkpoint's."""
    rewards = _values(metrics, "reward/mean")
    heldout = _values(metrics, "heldout/score")
    ratios = _values(metrics, "mismatch/ratio_min") + _values(metrics, "mismatch/ratio_max")
    return Summary(
        seed=seed,
        steps=progress["step"],
        reward_first=_mean(rewards[:ENDS]),
        reward_last=_mean(rewards[-ENDS:]),
        heldout_first=heldout[0] if heldout else None,
        heldout_last=heldout[-1] if heldout else None,
        log_min_p=log_min_p,
        pruned_share=_mean(_values(metrics, "pruned/share")),
        kl=_mean(_values(metrics, "mismatch/kl")),
        largest_log_ratio=max((abs(math.log(ratio)) for ratio in ratios), default=0.0),
        veto=_mean(_values(metrics, "veto/total")),
        mis=_mean(_values(metrics, "mis/fraction")),
        samples_trained=progress["samples"],
        versions_published=progress["seq"],
        replicas=tuple(replicas),
        samples_per_second=progress["samples"] / max(sum(_values(metrics, "time/step_s")), 1e-9),
        lost=len(books.lost),
        duplicated=len(books.duplicated),
        wall_s=wall_s,
    )


def find_faults(summary: Summary, *, zero_mismatch: bool = False) -> list[str]:
    """Reasons why the run does not show what the demo promises; empty if it does."""
    idle = [replica.id for replica in summary.replicas if replica.seq == 0]
    checks = {
        f"the reward did not rise: {summary.reward_first:.3f} to {summary.reward_last:.3f}": (
            summary.reward_last <= summary.reward_first
        ),
        f"{summary.lost} jobs were submitted and never came back": summary.lost > 0,
        f"{summary.duplicated} jobs were consumed more often than submitted": summary.duplicated > 0,
        f"never served weights that the trainer pushed: {', '.join(idle)}": bool(idle),
        f"only {summary.pruned_share:.1%} of the positions prune, but at least {MIN_PRUNED:.0%} should: raise "
        "sampling.log_min_p": summary.pruned_share < MIN_PRUNED,
        f"log-probs differ by up to {summary.largest_log_ratio:.2g}, but should be identical": (
            zero_mismatch and summary.largest_log_ratio != 0.0
        ),
    }
    return [fault for fault, applies in checks.items() if applies]


def to_table(summary: Summary) -> Table:
    table = Table("", "first", "last", title=f"{summary.steps} steps, seed {summary.seed}", title_justify="left")
    table.add_row("reward (training prompts)", f"{summary.reward_first:.3f}", f"{summary.reward_last:.3f}")
    if summary.heldout_first is not None and summary.heldout_last is not None:
        table.add_row("held-out score", f"{summary.heldout_first:.3f}", f"{summary.heldout_last:.3f}")
    table.add_section()
    figures = {
        "rho (scaled up from e^-13)": f"e^{summary.log_min_p:g}",
        "positions pruned": f"{summary.pruned_share:.1%}",
        "KL(infer || train) per token": f"{summary.kl:.2e}",
        "largest |log pi_train - log pi_infer|": f"{summary.largest_log_ratio:.2g}",
        "sequences vetoed": f"{summary.veto:.2%}",
        "sequences over the MIS bound": f"{summary.mis:.2%}",
        "samples trained": f"{summary.samples_trained:,}",
        "samples per second": f"{summary.samples_per_second:.0f}",
        "weight versions published": str(summary.versions_published),
        "jobs lost / duplicated": f"{summary.lost} / {summary.duplicated}",
        "wall time": f"{summary.wall_s:.0f} s",
    }
    for name, value in figures.items():
        table.add_row(name, "", value)
    for replica in summary.replicas:
        table.add_row(f"{replica.id} serves", "", replica.last_version or "nothing")
    return table


def _values(metrics: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [record[key] for record in metrics if record.get(key) is not None]


def _mean(values: Sequence[float]) -> float:
    """Mean; 0 for no values, so that a run without steps fails for its missing reward."""
    return sum(values) / len(values) if values else 0.0
