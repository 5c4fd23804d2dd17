"""No caller takes more than it leaves free."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dvp_rl.contract.shares import EVERYBODY, fits

LIMIT = 1000


@pytest.mark.parametrize("callers", range(1, 10))
def test_greedy_callers_end_up_with_equal_shares_and_one_is_left(callers: int) -> None:
    """Callers come one after another, take all that they may, and again whenever one of their requests has ended."""
    own = Counter({str(i): 0 for i in range(callers)})

    def take_all(name: str) -> None:
        while fits(name, own[name], 1, LIMIT - own.total()):
            own[name] += 1

    for name in own:
        take_all(name)
    assert own["0"] == LIMIT // 2
    for i in range(10 * LIMIT):
        own[str(i % callers)] -= 1
        for name in own:
            take_all(name)
    share = LIMIT / (callers + 1)
    assert all(abs(has - share) <= 1 for has in own.values())
    assert LIMIT - own.total() >= share - 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400)), max_size=60))
def test_whoever_comes_last_finds_room(asked: list[tuple[str, int]]) -> None:
    """A newcomer finds room whatever three callers have asked for, in any order and sizes."""
    own: Counter[str] = Counter()
    for name, more in asked:
        if fits(name, own[name], more, LIMIT - own.total()):
            own[name] += more
            assert own[name] <= LIMIT - own.total()
    assert LIMIT - own.total() >= LIMIT / 2**3
    assert fits("d", 0, LIMIT // 2**4, LIMIT - own.total())


def test_who_has_nothing_may_take_the_last_one() -> None:
    assert fits("a", 0, 1, 1)
    assert not fits("a", 1, 1, 2)
    assert not fits("a", 0, 2, 3)


def test_one_without_a_name_may_have_all() -> None:
    assert fits(EVERYBODY, LIMIT - 1, 1, 1)
    assert not fits(EVERYBODY, 0, 2, 1)
