"""Summary of a run: pure functions from the records it left behind to its figures and faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.table import Table

from dvp_rl.contract.weights import WeightVersion
from dvp_trainer.report.outcome import Outcome, outcome

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


@dataclass(frozen=True, kw_only=True)
class Summary(Outcome):
    """Contents of summary.json."""

    seed: int
    log_min_p: float
    samples_trained: int
    versions_published: int
    replicas: tuple[Replica, ...]
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
    return Summary(
        **asdict(outcome(metrics)),
        seed=seed,
        log_min_p=log_min_p,
        samples_trained=progress["samples"],
        versions_published=progress["seq"],
        replicas=tuple(replicas),
        lost=len(books.lost),
        duplicated=len(books.duplicated),
        wall_s=wall_s,
    )


def find_faults(summary: Summary, *, zero_mismatch: bool = False) -> list[str]:
    """Reasons why the run does not show what the demo promises; empty if it does."""
    idle = [replica.id for replica in summary.replicas if replica.seq == 0]
    checks = {
        f"the reward did not rise: {_shown(summary.reward_first, '.3f')} to {_shown(summary.reward_last, '.3f')}": (
            (summary.reward_last or 0.0) <= (summary.reward_first or 0.0)
        ),
        f"{summary.lost} jobs were submitted and never came back": summary.lost > 0,
        f"{summary.duplicated} jobs were consumed more often than submitted": summary.duplicated > 0,
        f"never served weights that the trainer pushed: {', '.join(idle)}": bool(idle),
        f"only {_shown(summary.pruned_share, '.1%')} of the positions prune, but at least {MIN_PRUNED:.0%} should: "
        "raise sampling.log_min_p": (summary.pruned_share or 0.0) < MIN_PRUNED,
        f"log-probs differ by up to {_shown(summary.largest_log_ratio, '.2g')}, but should be identical": (
            zero_mismatch and summary.largest_log_ratio != 0.0
        ),
    }
    return [fault for fault, applies in checks.items() if applies]


def to_table(summary: Summary) -> Table:
    table = Table("", "first", "last", title=f"{summary.steps} steps, seed {summary.seed}", title_justify="left")
    rewards, scores = (summary.reward_first, summary.reward_last), (summary.heldout_first, summary.heldout_last)
    table.add_row("reward (training prompts)", *(_shown(value, ".3f") for value in rewards))
    if summary.heldout_first is not None:
        table.add_row("held-out score", *(_shown(value, ".3f") for value in scores))
    played = {
        "turns per episode": (summary.turns_first, summary.turns_last),
        "failed calls of tools per episode": (summary.tool_errors_first, summary.tool_errors_last),
    }
    for name, counts in played.items():
        if counts[0] is not None:
            table.add_row(name, *(_shown(value, ".2f") for value in counts))
    table.add_section()
    figures = {
        "rho (scaled up from e^-13)": f"e^{summary.log_min_p:g}",
        "positions pruned": _shown(summary.pruned_share, ".1%"),
        "KL(infer || train) per token": _shown(summary.kl, ".2e"),
        "largest |log pi_train - log pi_infer|": _shown(summary.largest_log_ratio, ".2g"),
        "sequences vetoed": _shown(summary.veto, ".2%"),
        "sequences over the MIS bound": _shown(summary.mis, ".2%"),
        "samples trained": f"{summary.samples_trained:,}",
        "samples per second": _shown(summary.samples_per_second, ".0f"),
        "weight versions published": str(summary.versions_published),
        "jobs lost / duplicated": f"{summary.lost} / {summary.duplicated}",
        "wall time": f"{summary.wall_s:.0f} s",
    }
    for name, value in figures.items():
        table.add_row(name, "", value)
    for replica in summary.replicas:
        table.add_row(f"{replica.id} serves", "", replica.last_version or "nothing")
    return table


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
