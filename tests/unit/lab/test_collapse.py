"""The training study: its task, its sampler, its criterion, and that a stopped study resumes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dvp_lab import chain
from dvp_lab.cells import Outcome, run_cells
from dvp_lab.collapse import CELLS, LOG_MIN_P, Fate, Pair, candidates, choose
from dvp_lab.precision import Format
from dvp_lab.training import NOTHING_PRUNED, Mismatch, Run, Sampler
from dvp_trainer.learn.model import load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("chain") / "model"
    chain.teach(folder, steps=60)
    return folder


def make_run(model: Path, **settings: object) -> Run:
    return Run(**({"model": model, "seed": 1, "steps": 3, "length": 12, "lr": 1e-3, "groups": 4, "n": 4} | settings))


def test_a_reward_counts_right_transitions() -> None:
    prompt = torch.tensor([[chain.MODULUS + 2, 31], [chain.MODULUS + 3, 1], [chain.MODULUS + 1, 5]])
    completion = torch.tensor([[1, 3, 5, 7], [4, 8, 11, 0], [0, 1, 60, 61]])
    assert chain.rewards(prompt, completion).tolist() == [1.0, 0.5, 0.0]


def test_without_mismatch_both_sides_agree_up_to_rounding(model: Path) -> None:
    for step in make_run(model):
        assert step["mismatch/ratio_min"] == pytest.approx(1, abs=1e-4)
        assert step["mismatch/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert step["optimizer/updates"] == 1


@pytest.mark.parametrize(
    "mismatch", [Mismatch(weights=Format.INT4), Mismatch(kv=Format.FP8), Mismatch(field=0.3), Mismatch(staleness=1)]
)
def test_every_source_of_mismatch_is_one(model: Path, mismatch: Mismatch) -> None:
    last = list(make_run(model, mismatch=mismatch))[-1]
    assert last["mismatch/ratio_max"] > 1.001


def test_a_stale_sampler_has_the_weights_of_some_steps_ago(model: Path) -> None:
    run = make_run(model)
    policy = load_model(run.settings().model)
    sampler, first = Sampler(policy, Mismatch(staleness=2), NOTHING_PRUNED), policy.lm_head.weight.detach().clone()
    for step in range(4):
        sampler.follow(policy)
        behind = max(0, step - 2)
        torch.testing.assert_close(sampler._model.lm_head.weight, first + behind)
        with torch.no_grad():
            policy.lm_head.weight += 1


def test_the_error_field_is_fixed_by_its_state_and_has_the_size_asked_for(model: Path) -> None:
    policy = load_model(make_run(model).settings().model)
    sampler = Sampler(policy, Mismatch(field=0.5), NOTHING_PRUNED)
    states = torch.randn(200, policy.config.hidden_size, generator=torch.Generator().manual_seed(0))
    error = sampler._error(states)
    torch.testing.assert_close(error[:7], sampler._error(7 * states[:7]), rtol=0, atol=1e-4)  # scale is irrelevant
    assert float(error.std()) == pytest.approx(0.5, rel=0.1)
    assert float(error.mean()) == pytest.approx(0, abs=0.02)


def test_rollouts_are_pruned_by_their_own_threshold(model: Path) -> None:
    (step,) = make_run(model, steps=1, infer_log_min_p=LOG_MIN_P)
    assert step["kept/mass_mean_infer"] < 0.999
    assert step["kept/mass_mean_train"] == pytest.approx(1)


def outcome(rewards: list[float]) -> Outcome:
    return Outcome({"reward/mean": list(rewards)}, 0.0)


@pytest.mark.parametrize(
    ("rewards", "fate", "collapsed", "lost_half"),
    [
        ([0.2] * 20 + [0.8] * 20, (0.2, 0.8, 0.8), False, False),
        ([0.3] * 20 + [0.8] * 20 + [0.41] * 20, (0.3, 0.8, 0.41), False, False),
        ([0.3] * 20 + [0.8] * 20 + [0.35] * 20, (0.3, 0.8, 0.35), False, True),
        ([0.6] * 20 + [0.41] * 20, (0.6, 0.6, 0.41), True, False),
        ([0.6] * 20 + [0.46] * 20, (0.6, 0.6, 0.46), False, False),
        ([0.4] * 5 + [0.8] * 20 + [0.1] * 20, (0.7, 0.8, 0.1), True, True),
    ],
)
def test_criterion(rewards: list[float], fate: tuple[float, ...], collapsed: bool, lost_half: bool) -> None:
    found, control = Fate.of(outcome(rewards)), Fate(0.6, 0.9, 0.9)
    assert tuple(found) == pytest.approx(fate)
    assert found.collapsed(control) is collapsed
    assert found.lost_half is lost_half


def test_the_cell_is_chosen_by_the_declared_rule() -> None:
    fell, held, rose, idle = Fate(0.6, 0.8, 0.1), Fate(0.6, 0.8, 0.5), Fate(0.6, 0.9, 0.9), Fate(0.2, 0.2, 0.2)
    both_fell, small_gap, shows, wide, learns_nothing, all_fell = (
        Pair(CELLS[0], *fates)
        for fates in [
            (fell, fell, rose),
            (held, rose, rose),
            (fell, held, rose),
            (fell, rose, rose),
            (fell, idle, rose),
            (fell, rose, fell),
        ]
    )
    mapped = [both_fell, small_gap, all_fell, learns_nothing, shows, wide]
    assert candidates(mapped, 4) == [wide, shows, learns_nothing, all_fell]
    assert candidates([both_fell, small_gap], 1) == [small_gap]
    assert choose([[wide, small_gap], [shows, shows], [both_fell, wide]]) == 1
    assert choose([[shows, shows], [wide, shows], [all_fell, wide]]) == 1


def test_a_run_is_made_once_and_again_if_it_is_another(model: Path, tmp_path: Path) -> None:
    runs = {name: make_run(model, seed=seed, steps=1) for seed, name in enumerate("ab")}

    def written() -> dict[str, int]:
        return {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in runs}

    with ThreadPoolExecutor(1) as pool:
        made = dict(run_cells(runs, tmp_path, pool))
        first = written()
        assert dict(run_cells(runs, tmp_path, pool)) == made
        assert written() == first
        other = dict(run_cells(runs | {"b": replace(runs["b"], lr=0.5)}, tmp_path, pool))
    assert other["a"] == made["a"]
    assert written()["a"] == first["a"]
    assert written()["b"] != first["b"]
