from __future__ import annotations

import pytest

from dvp_trainer.data.batch import Batch
from tests.kit.records import make_sample, make_scored


@pytest.mark.parametrize(
    ("groups", "parts", "sizes"), [(8, 4, [2] * 4), (9, 4, [2, 2, 2, 3]), (10, 8, [1, 1, 1, 2] * 2), (3, 1, [3])]
)
def test_a_batch_is_split_into_as_many_parts_as_asked_for(groups: int, parts: int, sizes: list[int]) -> None:
    samples = [make_sample([5, 6], [-0.5, -0.25])] * 2
    scored = tuple(make_scored([1, 2], samples, [1.0, 0.0], position=position) for position in range(groups))
    split = Batch(scored).split(parts)
    assert [len(part.groups) for part in split] == sizes
    assert sum((part.groups for part in split), ()) == scored
    rows = [episode.index for part in split for episode in part.episodes()]
    assert rows == list(range(2 * groups))
