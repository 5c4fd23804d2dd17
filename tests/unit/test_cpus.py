"""CPU limits of containers, as the kernel reports them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dvp_rl import cpus
from dvp_rl.engines import threads


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/", {}, []),
        ("0::/", {"": "150000 100000"}, [1.5]),
        ("0::/", {"": "max 100000"}, []),
        ("0::/", {"": "unreadable"}, []),
        ("1:cpu:/a\n0::/a/b", {"": "max 100000", "a": "400000 100000", "a/b": "50000 100000"}, [0.5, 4.0]),
        ("0::/docker/seen-from-outside", {"": "200000 100000"}, [2.0]),
        ("1:cpu:/version-1", {"cpu": "100000 100000"}, []),
    ],
)
def test_limits_of_all_groups_around_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, limits: dict[str, str], expected: list[float]
) -> None:
    for group, text in limits.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{own}\n")
    monkeypatch.setattr(cpus, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(cpus, "OWN_GROUP", tmp_path / "own")
    assert list(cpus.quotas()) == expected


@pytest.mark.parametrize(("limit", "expected"), [(0.2, 1), (1.0, 1), (1.5, 2), (1000.0, 8)])
def test_a_limit_counts_where_it_is_less_than_the_cpus(
    monkeypatch: pytest.MonkeyPatch, limit: float, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(cpus, "quotas", lambda: iter([limit]))
    assert cpus.usable_cpus() == expected


def test_without_control_groups_all_it_may_run_on_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "OWN_GROUP", tmp_path / "absent")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert cpus.usable_cpus() == 8


@pytest.mark.parametrize(
    ("asked", "reproducible", "usable", "expected"),
    [(3, True, 1, 3), (3, False, 1, 3), (None, True, 4, 1), (0, True, 4, 1), (None, False, 1, 1), (0, False, 4, 4)],
)
def test_threads_of_pytorch(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, reproducible: bool, usable: int, expected: int
) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: usable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert threads.num_threads(asked, reproducible=reproducible) == expected
