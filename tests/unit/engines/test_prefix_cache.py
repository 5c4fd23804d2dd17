"""Which prefix a prompt continues, and which ones are forgotten."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dvp_rl.engines.prefix_cache import LEAST_TOKENS, MOST_PREFIXES, Prefix, PrefixCache, num_shared

BYTES_PER_TOKEN = 2 * 4
"""One layer, whose keys and values have one head of one float32."""


def prefix(*token_ids: int) -> Prefix:
    cells = torch.zeros(1, len(token_ids), 1)
    return Prefix(np.array(token_ids, np.int32), [(cells, cells.clone())])


def ids(*parts: int) -> list[int]:
    """LEAST_TOKENS equal tokens for each part."""
    return [part for part in parts for _ in range(LEAST_TOKENS)]


def found(cache: PrefixCache, token_ids: list[int]) -> int:
    beginning = cache.find(np.array(token_ids, np.int32))
    return 0 if beginning is None else beginning.length


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_what_two_prompts_share(first: list[int], second: list[int]) -> None:
    length = num_shared(np.array(first, np.int32), np.array(second, np.int32))
    assert first[:length] == second[:length]
    assert length in (len(first), len(second)) or first[length] != second[length]


def test_the_longest_beginning_is_continued() -> None:
    cache = PrefixCache(10**6)
    cache.keep(prefix(*ids(1, 2)))
    cache.keep(prefix(*ids(1, 3)))
    assert found(cache, [*ids(1, 3), 9]) == 2 * LEAST_TOKENS
    assert found(cache, [*ids(1, 2), 9]) == 2 * LEAST_TOKENS
    assert found(cache, ids(1, 4)) == LEAST_TOKENS
    assert found(cache, ids(4, 1)) == 0


def test_the_last_token_of_a_prompt_is_always_read() -> None:
    cache = PrefixCache(10**6)
    cache.keep(prefix(*ids(1, 2)))
    assert found(cache, ids(1, 2)) == 2 * LEAST_TOKENS - 1
    assert found(cache, ids(1)) == 0, "too short"


def test_a_conversation_takes_the_place_of_its_earlier_turns() -> None:
    cache = PrefixCache(10**6)
    for turns in range(1, 5):
        cache.keep(prefix(*ids(*range(turns))))
    assert len(cache) == 1
    assert cache.num_bytes == 4 * LEAST_TOKENS * BYTES_PER_TOKEN
    cache.keep(prefix(*ids(0, 1)))
    assert len(cache) == 1, "the longer one begins with it"


def test_of_equals_the_one_used_last_is_continued() -> None:
    """So that a conversation that has ended is not used by others that have its beginning in common."""
    cache = PrefixCache(3 * 2 * LEAST_TOKENS * BYTES_PER_TOKEN)
    for part in (1, 2, 3):
        cache.keep(prefix(*ids(0, part)))
    assert found(cache, ids(0, 4)) == LEAST_TOKENS
    cache.keep(prefix(*ids(0, 4)))
    assert [found(cache, [*ids(0, part), 9]) > LEAST_TOKENS for part in (1, 2, 3, 4)] == [False, True, True, True]


def test_a_small_beginning_is_not_continued() -> None:
    cache = PrefixCache(10**6)
    cache.keep(prefix(*ids(0)))
    assert found(cache, ids(0, 1)) == LEAST_TOKENS
    assert found(cache, [*ids(0, 1), 1]) == 0


def test_a_copy_is_kept() -> None:
    cache, given = PrefixCache(10**6), prefix(*ids(1))
    cache.keep(given)
    given.layers[0][0].fill_(7)
    beginning = cache.find(np.array([*ids(1), 9], np.int32))
    assert beginning is not None
    assert not beginning.prefix.layers[0][0].any()


def test_the_one_used_longest_ago_is_forgotten() -> None:
    cache = PrefixCache(3 * LEAST_TOKENS * BYTES_PER_TOKEN)
    for part in (1, 2, 3):
        cache.keep(prefix(*ids(part)))
    assert found(cache, [*ids(1), 9]) == LEAST_TOKENS
    cache.keep(prefix(*ids(4)))
    assert [found(cache, [*ids(part), 9]) > 0 for part in (1, 2, 3, 4)] == [True, False, True, True]
    assert cache.num_bytes <= cache.max_bytes


def test_there_are_never_too_many() -> None:
    cache = PrefixCache(10**9)
    for part in range(MOST_PREFIXES + 1):
        cache.keep(prefix(*ids(part)))
    assert len(cache) == MOST_PREFIXES
    assert [found(cache, [*ids(part), 9]) > 0 for part in (0, 1, MOST_PREFIXES)] == [False, True, True]


def test_what_is_too_short_or_too_large_is_not_kept() -> None:
    cache = PrefixCache(2 * LEAST_TOKENS * BYTES_PER_TOKEN)
    cache.keep(prefix(*ids(1)))
    cache.keep(prefix(*ids(2, 3, 4)))
    cache.keep(prefix(*ids(5)[1:]))
    assert len(cache) == 1
    assert found(cache, [*ids(1), 9]) == LEAST_TOKENS
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)
