"""Checks of the answers of a server with the plugin against float64 logits, without any code of dvp_rl.dvp."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .server import Answer

TOLERANCE = 5e-5


class Reading(NamedTuple):
    """The values of one answer, [T] each."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    kept_mass: list[float | None]
    kept_count: list[int | None]


def read(answer: Answer) -> Reading:
    meta = answer["meta_info"]
    logprobs = np.array([logprob for logprob, _, _ in meta["output_token_logprobs"]])
    token_ids = np.array([token_id for _, token_id, _ in meta["output_token_logprobs"]])
    assert token_ids.tolist() == answer["output_ids"]
    blank: list[Any] = [None] * len(token_ids)
    return Reading(token_ids, logprobs, meta.get("kept_mass", blank), meta.get("kept_count", blank))


def check_constrained(
    answer: Answer, logits: NDArray[np.float64], log_min_p: float, temperature: float, *, at_least: float = 0.98
) -> int:
    """Checks every number against logits [T, V]; returns the number of positions checked.

    Skips positions where a token is so close to the threshold that float32 logits may decide otherwise.
    """
    token_ids, logprobs, mass, count = read(answer)
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature
    keep = scaled >= log_min_p
    weights = np.exp(scaled)
    kept = (weights * keep).sum(-1)
    clear = (np.abs(scaled - log_min_p) > 2 * TOLERANCE / temperature).all(-1)
    chosen = scaled[np.arange(len(token_ids)), token_ids]
    close = {"atol": TOLERANCE, "rtol": 0}
    assert (chosen[clear] >= log_min_p).all(), "a token outside the set"
    np.testing.assert_allclose(logprobs[clear], (chosen - np.log(kept))[clear], **close)
    np.testing.assert_allclose(np.array(mass, float)[clear], (kept / weights.sum(-1))[clear], **close)
    np.testing.assert_array_equal(np.array(count, float)[clear], keep.sum(-1)[clear])
    assert (~clear).sum() <= max(2, (1 - at_least) * len(clear)), "too few positions are far enough from the threshold"
    return int(clear.sum())


def check_unconstrained(answer: Answer, logits: NDArray[np.float64], temperature: float) -> None:
    token_ids, logprobs, mass, count = read(answer)
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature
    full = scaled[np.arange(len(token_ids)), token_ids] - np.log(np.exp(scaled).sum(-1))
    np.testing.assert_allclose(logprobs, full, atol=TOLERANCE, rtol=0)
    assert {*mass, *count} == {None}
