"""Rates, curves and the feed in isolation."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from dvp_rl.contract.errors import NotFoundError, OverloadedError
from dvp_rl.contract.metrics import MAX_METRICS
from dvp_rl.monitor.bodies import Completions
from dvp_rl.monitor.completions import MAX_STEPS, CompletionsFile
from dvp_rl.monitor.curves import MAX_POINTS, MetricsFile, thinned
from dvp_rl.monitor.feed import Feed, Viewers
from dvp_rl.monitor.growing import MAX_READ, GrowingFile, Grown
from dvp_rl.monitor.rates import WINDOW_S, Rates
from dvp_rl.monitor.tables import duration
from tests.kit.records import write_completions


def test_rates_are_over_the_window() -> None:
    rates = Rates()
    assert rates.update(0.0, {"a": 100}) == {}
    assert rates.update(10.0, {"a": 120, "b": 5}) == {"a": 2.0, "b": 0.5}
    for second in range(11, 60):
        found = rates.update(float(second), {"a": 120, "b": 5})
    assert found == {"a": 0.0, "b": 0.0}
    assert rates.update(60.0, {"a": 180, "b": 5})["a"] == pytest.approx(60 / WINDOW_S)


def test_a_wiped_broker_starts_the_count_anew() -> None:
    rates = Rates()
    rates.update(0.0, {"a": 100})
    assert rates.update(1.0, {}) == {}
    assert rates.update(2.0, {"a": 3}) == {"a": 3.0}


@pytest.mark.parametrize("count", [1, MAX_POINTS, MAX_POINTS + 1, 10_000])
def test_thinning_keeps_the_mean(count: int) -> None:
    points = [(float(step), 2.0 * step) for step in range(count)]
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS
    assert kept[0][0] <= count / MAX_POINTS
    assert all(value == pytest.approx(2 * step) for step, value in kept)


def test_a_replaced_file_is_read_anew_and_damage_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    missing = file.look()
    assert missing is not None
    assert "No such file" in missing.error
    assert file.look() is None
    path.write_text('{"step": 1, "reward/mean": 0.5}\nnonsense\n[]\n{"step": 2, "reward/mean": null}\n')
    seen = file.look()
    assert seen is not None
    assert seen.panels[0].lines[0].points == ((1.0, 0.5),)
    assert "2 damaged lines" in seen.error
    assert file.look() is None
    beside = tmp_path / "beside"
    beside.write_text("".join(json.dumps({"step": step, "reward/mean": 1.0}) + "\n" for step in (1, 2)))
    beside.rename(path)
    again = file.look()
    assert again is not None
    assert (again.error, len(again.panels[0].lines[0].points)) == ("", 2)


@pytest.mark.parametrize(
    ("line", "num_damaged"),
    [
        ('{"step": NaN, "reward/mean": 1}', 1),
        ('{"step": 1e400, "reward/mean": 1}', 1),
        (f'{{"step": {10**400}}}', 1),
        ('{"step": "2"}', 1),
        ("[" * 200_000, 1),
        (f'{{"step": 2, "time": {10**400}, "reward/mean": {10**400}, "mismatch/kl": -Infinity}}', 0),
        ('{"step": 2, "staleness/groups_0": -1}', 0),
    ],
)
def test_odd_lines_are_left_out(tmp_path: Path, line: str, num_damaged: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "reward/mean": 0.5, "staleness/groups_1": 1}}\n{line}\n')
    seen = MetricsFile(path).look()
    assert seen is not None
    assert seen.error == (f"{path}: 1 damaged lines were left out" if num_damaged else "")
    assert [panel.lines[0].points for panel in seen.panels] == [((1.0, 0.5),)]


def test_a_file_that_is_replaced_while_it_is_read_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, new = tmp_path / "metrics.jsonl", tmp_path / "new"
    path.write_text('{"step": 1, "reward/mean": 1}\n')
    new.write_text('{"step": 1, "reward/mean": 2}\n{"step": 2, "reward/mean": 2}\n')
    file, opened = MetricsFile(path), GrowingFile.open

    @contextmanager
    def replaced(growing: GrowingFile) -> Iterator[BinaryIO]:
        with opened(growing) as old:
            if new.exists():
                new.replace(path)
            yield old

    monkeypatch.setattr(GrowingFile, "open", replaced)
    assert file.look() is not None
    seen = file.look()
    assert seen is not None
    assert [value for _, value in seen.panels[0].lines[0].points] == [2, 2]


def test_what_a_harness_counts_is_charted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    known = {"episodes/turns_mean": 2.0, "episodes/tool_errors_mean": 1.0, "length/environment_mean": 5.0}
    own = {f"episodes/luck_{number:02}_mean": float(number) for number in range(MAX_METRICS + 1)}
    records = [{"step": 1} | known, {"step": 2} | known | own, {"step": 3, "episodes/late_mean": 1.0}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    seen = MetricsFile(path).look()
    assert seen is not None
    lines = {panel.title: {line.label: line.newest for line in panel.lines} for panel in seen.panels}
    assert lines == {
        "Tokens per episode": {"environment": (2, 5)},
        "Turns per episode": {"turns": (2, 2), "tool errors": (2, 1)},
        **{f"luck_{number:02}": {f"luck_{number:02}": (2, number)} for number in range(MAX_METRICS)},
    }


def test_the_time_of_a_step_is_read_where_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [{"step": step, "reward/mean": 1.0} | ({"time": 100.0 + step} if step != 2 else {}) for step in (1, 2, 3)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    seen = MetricsFile(path).look()
    assert seen is not None
    assert seen.times[:2] == ((1.0, 101.0), (3.0, 103.0))


def test_how_many_steps_a_point_stands_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for count, expected in ((MAX_POINTS, 1), (MAX_POINTS + 1, 2)):
        records = ({"step": step, "time": 9.0 + step, "reward/mean": float(step)} for step in range(count))
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        seen = MetricsFile(path).look()
        assert seen is not None
        assert seen.steps_per_point == expected
        assert seen.panels[0].lines[0].newest == (count - 1, count - 1), "the newest value is no mean"
        assert seen.times[-1] == (count - 1, 9.0 + count - 1)


def test_the_histogram_is_of_recent_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old = [{"step": 1, "staleness/groups_3": 50.0}]
    recent = [{"step": step, "staleness/groups_0": 3.0, "staleness/groups_8": 1.0} for step in (150, 200)]
    path.write_text("".join(json.dumps(record) + "\n" for record in old))
    first = MetricsFile(path).look()
    assert first is not None
    assert first.staleness is not None
    assert first.staleness.bars == (("0", 0.0), ("1", 0.0), ("2", 0.0), ("3", 1.0))
    path.write_text("".join(json.dumps(record) + "\n" for record in old + recent))
    seen = MetricsFile(path).look()
    assert seen is not None
    assert seen.staleness is not None
    assert [bar for bar in seen.staleness.bars if bar[1]] == [("0", 0.75), ("8+", 0.25)]


async def test_one_caller_leaves_others_room_to_watch() -> None:
    viewers = Viewers(max_viewers=4)
    feeds = [Feed(viewers), Feed(viewers)]
    watching = []
    for caller, feed in (("alice", feeds[0]), ("alice", feeds[1]), ("bob", feeds[1])):
        viewers.admit(caller)
        feed.publish("picture", "1")
        watching.append(feed.follow(caller=caller))
        await anext(watching[-1])
    assert [feed.num_viewers for feed in feeds] == [1, 2]
    for caller, said in (
        ("alice", r"alice has 2 viewers, and 1 of 4 places \(max_viewers\)"),
        ("bob", "bob has 1 viewers"),
    ):
        with pytest.raises(OverloadedError, match=said):
            viewers.admit(caller)
    viewers.admit("carol")
    for viewer in watching:
        await viewer.aclose()
    assert (viewers.num, *(feed.num_viewers for feed in feeds)) == (0, 0, 0)


async def test_a_slow_viewer_skips_what_was_overtaken() -> None:
    viewers = Viewers(max_viewers=1)
    feed = Feed(viewers)
    feed.publish("picture", "1")
    viewers.admit()
    viewer = feed.follow()
    assert await anext(viewer) == b"event: picture\ndata: 1\n\n"
    with pytest.raises(OverloadedError, match=r"^1 viewers are watching already \(max_viewers\)"):
        viewers.admit()
    for number in range(2, 9):
        feed.publish("picture", str(number))
    feed.publish("curves", "c")
    assert [await anext(viewer), await anext(viewer)] == [
        b"event: picture\ndata: 8\n\n",
        b"event: curves\ndata: c\n\n",
    ]
    waiting = asyncio.ensure_future(anext(viewer, b"end"))
    feed.close()
    assert await waiting == b"end"
    assert viewers.num == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (1e6, "12 d")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_file_that_grows_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = GrowingFile(path)
    file.look()
    path.write_bytes(b"")
    assert file.look() == Grown([]), "it is empty, no longer missing"
    assert file.look() is None
    path.write_bytes(b"one\ntw")
    assert file.look() == Grown([b"one"], 0, anew=False)
    assert file.look() is None
    with path.open("ab") as end:
        end.write(b"o\n" + b"3" * (MAX_READ + 1) + b"\nfour\n")
    assert file.look() == Grown([b"two", b"3" * (MAX_READ + 1)], 4, anew=False)
    assert file.look() == Grown([b"four"], MAX_READ + 10, anew=False)
    with path.open("r+b") as overwritten:
        overwritten.write(b"other\n".ljust(MAX_READ + 15, b"_") + b"\nmore\n")
    seen = file.look()
    assert seen is not None
    assert seen.anew, "the same file has other lines"
    assert seen.lines[0] == b"other"
    path.rename(tmp_path / "old")
    path.write_bytes(b"ne")
    assert file.look() == Grown([], 0, anew=True)
    path.write_bytes(b"new\n")
    assert file.look() == Grown([b"new"], 0, anew=False)


def test_each_reason_not_to_read_a_file_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = GrowingFile(path)

    def told() -> list[str]:
        return [seen.error for seen in (file.look(), file.look()) if seen is not None]

    assert told() == [f"{path}: No such file or directory"]
    os.mkfifo(path)
    assert told() == [f"{path}: not a regular file"]
    path.unlink()
    path.mkdir()
    assert told() == [f"{path}: Is a directory"]


def test_steps_of_a_long_file_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    file = CompletionsFile(path)
    write_completions(path, range(1, 2001), "x" * (2 * MAX_READ // 2000))
    first = file.look()
    assert first is not None
    assert first.steps == tuple(range(2001 - MAX_STEPS, 2001))
    assert Completions.model_validate_json(file.read(None)).step == 2000
    write_completions(path, [1], "of the next start")
    second = file.look()
    assert second is not None
    assert second.steps == (1,)
    assert second.since > first.since
    assert Completions.model_validate_json(file.read(1)).completions[0].prompt == "of the next start"


def test_half_characters_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    write_completions(path, [1], "\ud800x")
    file = CompletionsFile(path)
    file.look()
    assert Completions.model_validate_json(file.read(1)).completions[0].prompt == "?x"


DAMAGE = (
    "{}",
    '{"step": 3, "completions": [{"row": 1}]}',
    '{"step": 3, "completions": [',
    '{"step": 3, "completions": ' + "[" * 100_000,
    '{"step": ' + "9" * 5000 + ', "completions": []}',
)


@pytest.mark.parametrize("damage", DAMAGE, ids=["empty", "fields", "cut", "nested", "huge"])
def test_a_damaged_record_of_completions(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "completions.jsonl"
    write_completions(path, [1, 2])
    path.write_text(path.read_text() + f"{damage}\n")
    file = CompletionsFile(path)
    seen = file.look()
    assert seen is not None
    assert Completions.model_validate_json(file.read(2)).step == 2
    with pytest.raises(NotFoundError, match="of step 3"):
        file.read(3)
    path.unlink()
    with pytest.raises(NotFoundError, match="No such file"):
        file.read(1)
