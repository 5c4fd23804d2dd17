from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.queue.passk import default_ks, pass_at_k, score_held_out


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_equals_the_enumeration_of_all_draws(n: int) -> None:
    for correct in range(n + 1):
        samples = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            draws = list(combinations(samples, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_stays_exact_for_many_samples() -> None:
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5, abs=1e-12)
    assert pass_at_k(1024, 0, 1024) == 0.0
    assert pass_at_k(1024, 513, 512) == 1.0


@pytest.mark.parametrize("k", [0, 5])
def test_k_outside_the_samples_is_refused(k: int) -> None:
    with pytest.raises(ConfigError, match=f"k = {k} with n = 4"):
        pass_at_k(4, 1, k)


def test_default_ks() -> None:
    assert [default_ks(n) for n in (1, 4, 6)] == [(1,), (1, 2, 4), (1, 2, 4, 6)]


def test_scores_of_a_held_out_set() -> None:
    score = score_held_out([[1, 0, 0, 0], [0.5, 0.9, 0, 0]], [True, *[False] * 7])
    assert (score.num_prompts, score.n, score.avg) == (2, 4, pytest.approx(2.4 / 8))
    assert score.pass_at == {1: pytest.approx(1 / 8), 2: pytest.approx(1 / 4), 4: pytest.approx(1 / 2)}
    assert score.truncated_share == 1 / 8
    assert score.stderr == pytest.approx(0.05), "the prompts' means are 0.25 and 0.35"
    assert score.metrics()["heldout/stderr"] == score.stderr
    assert score.metrics()["heldout/pass_at_4"] == 0.5
    assert "heldout/avg_at_4" in score.metrics()


def test_partial_credit_counts_as_correct_from_the_given_reward_on() -> None:
    score = score_held_out([[0.5, 0.4]], ks=[1], correct_from=0.5)
    assert score.pass_at == {1: 0.5}
    assert score.metrics()["heldout/pass_at_1_from_0.5"] == 0.5
    assert "heldout/pass_at_1" not in score.metrics()
    assert "heldout/stderr" not in score.metrics(), "one prompt tells nothing about others"


def test_the_standard_error_is_that_of_scores_of_drawn_prompts() -> None:
    """By enumeration: the mean of its square over all draws of three prompts is the variance of their scores."""
    prompts = ([1, 1], [1, 0], [0, 0])
    drawn = [score_held_out(draw) for draw in product(prompts, repeat=3)]
    assert np.mean([score.stderr**2 for score in drawn]) == pytest.approx(np.var([score.avg for score in drawn]))


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one of each"):
        score_held_out([])
