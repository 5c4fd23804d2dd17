"""The optimizer step against the formula, written out sequence by sequence in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.group import FinishReason
from dvp_trainer.config import TrainSettings
from dvp_trainer.data.batch import Batch, ScoredGroup
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner
from tests.kit.models import make_model
from tests.kit.records import make_sample, make_scored

from .exact import LOG_MIN_P, TEMPERATURE, draw, expected_gradient, gradient_of, oracle_logprobs

VOCAB = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, vocab_size=VOCAB, seed=3)
    return folder


@pytest.fixture
def make_learner(device: torch.device, folder: Path, tmp_path: Path) -> Callable[..., Learner]:
    def make(**sections: dict[str, Any]) -> Learner:
        values: dict[str, Any] = {
            "run_id": "unit",
            "out_dir": tmp_path,
            "steps": 1,
            "model": {"path": folder, "device": str(device)},
            "data": {"train": "unused.jsonl"},
            "reward": {"name": "exact_match"},
            "sampling": {"n": 3, "log_min_p": LOG_MIN_P, "temperature": TEMPERATURE},
            "optimizer": {"lr": 1e-3, "max_grad_norm": 1e9},
        }
        settings = TrainSettings(
            **{name: values.get(name, {}) | section for name, section in sections.items()}
            | {name: value for name, value in values.items() if name not in sections}
        )
        return Learner(load_model(settings.model), settings, pad_id=0)

    return make


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model


def make_batch(oracle: PreTrainedModel, *, noise: float = 0.1) -> Batch:
    """Two groups of three, prompts and completions of different lengths; the engine's log-probs are a little off."""
    rng, groups = np.random.default_rng(0), []
    for g, prompt in enumerate([[5, 9, 11], [7, 8, 12, 20, 31]]):
        samples = []
        for i in range(3):
            tokens = draw(oracle, prompt, 2 + i + g, seed=10 * g + i)
            exact = oracle_logprobs(oracle, prompt, tokens).detach().numpy()
            infer = np.minimum(exact + noise * rng.standard_normal(len(tokens)), 0)
            samples.append(make_sample(tokens, infer))
        groups.append(make_scored(prompt, samples, [1.0, 0.0, 0.5 * g], position=g))
    return Batch(tuple(groups))


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    scale = max(float(g.abs().max()) for g in expected.values())
    assert scale > 1e-4
    for name, gradient in expected.items():
        error = float((actual[name].cpu().double() - gradient).abs().max())
        assert error < 1e-5 * max(scale, 1), (name, error, scale)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("log_min_p", [-13.0, -6.0, math.log(0.1)])
def test_the_train_logprobs_equal_the_oracle(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel, log_min_p: float, temperature: float
) -> None:
    learner = make_learner(sampling={"n": 3, "log_min_p": log_min_p, "temperature": temperature})
    batch = make_batch(oracle)
    seen = learner.look(batch.episodes())
    pairs = [(s.group.prompt_ids, sample) for s in batch.groups for sample in s.group.samples]
    for row, (prompt, sample) in enumerate(pairs):
        expected = oracle_logprobs(oracle, prompt.tolist(), sample.token_ids.tolist(), log_min_p, temperature).detach()
        inside = seen.train.inside[row][seen.mask[row]].cpu()
        actual = seen.train.logprobs[row][seen.mask[row]].cpu().double()
        assert torch.equal(inside, expected.isfinite())
        assert bool(inside.any())
        assert float((actual - expected)[inside].abs().max()) < 5e-5


@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 10_000])
def test_the_gradient_is_the_estimator(
    make_learner: Callable[..., Learner], folder: Path, oracle: PreTrainedModel, micro_batch_tokens: int
) -> None:
    learner, batch = make_learner(model={"path": folder, "micro_batch_tokens": micro_batch_tokens}), make_batch(oracle)
    assert_close(gradient_of(learner, batch), expected_gradient(oracle, batch, cap=2.0, denominator=6))


def test_rejected_sequences_count_in_the_denominator_all_and_not_in_kept(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel
) -> None:
    batch = make_batch(oracle, noise=0.0)
    low = batch.groups[0].group.samples[0]
    surprising = make_sample(low.token_ids.tolist(), low.logprobs - 1.0)  # w = e^T, above the cap
    first = make_scored([5, 9, 11], [surprising, *batch.groups[0].group.samples[1:]], batch.groups[0].rewards)
    batch = Batch((first, batch.groups[1]))
    for policy, denominator in (("all", 6), ("kept", 5)):
        gradient = gradient_of(make_learner(correction={"denominator": policy}), batch)
        assert_close(gradient, expected_gradient(oracle, batch, cap=2.0, denominator=denominator))


def test_an_outside_token_takes_its_sequence_out_and_nothing_else(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel
) -> None:
    batch = make_batch(oracle, noise=0.0)
    prompt = batch.groups[0].group.prompt_ids.tolist()
    logits = oracle(input_ids=torch.tensor([prompt])).logits[0, -1]
    outsider = make_sample([int(logits.argmin())], [-0.5])
    group = make_scored(prompt, [outsider, *batch.groups[0].group.samples[1:]], batch.groups[0].rewards)
    batch = Batch((group, batch.groups[1]))
    learner = make_learner()
    assert_close(gradient_of(learner, batch), expected_gradient(oracle, batch, cap=2.0, denominator=6))
    assert make_learner().step(batch)["veto/outside"] == pytest.approx(1 / 6)


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_groups_without_signal_do_no_forward_and_are_counted(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel, denominator: str
) -> None:
    signal, flat = make_batch(oracle).groups
    flat = ScoredGroup(flat.group, (1.0, 1.0, 1.0), 0)
    learner = make_learner(correction={"denominator": denominator})
    seen = list[int]()
    learner.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend(kwargs["input_ids"].flatten().tolist()), with_kwargs=True
    )
    metrics = learner.step(Batch((signal, flat)))
    samples = signal.group.samples
    assert len(seen) == len(signal.group.prompt_ids) + sum(len(sample.token_ids) - 1 for sample in samples)
    assert metrics["groups/no_signal"] == 1
    assert_close(
        {n: p.grad for n, p in learner.model.named_parameters() if p.grad is not None},
        expected_gradient(oracle, Batch((signal,)), cap=2.0, denominator=6),
    )


def test_a_batch_with_nothing_to_learn_from_leaves_the_weights_alone(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel
) -> None:
    learner = make_learner()
    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    flat = tuple(ScoredGroup(scored.group, (0.0, 0.0, 0.0), 0) for scored in make_batch(oracle).groups)
    unsure = tuple(
        make_scored(
            scored.group.prompt_ids.tolist(),
            [make_sample(s.token_ids.tolist(), s.logprobs - 5.0) for s in scored.group.samples],
            scored.rewards,
        )
        for scored in make_batch(oracle).groups
    )
    for groups in (flat, unsure):
        assert learner.step(Batch(groups))["optimizer/updates"] == 0
    assert all(torch.equal(before[name], p) for name, p in learner.model.named_parameters())


def test_two_updates_per_batch_log_drift_apart_from_mismatch(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel
) -> None:
    batch = make_batch(oracle, noise=0.0)
    metrics = make_learner(batch={"updates": 2}, optimizer={"lr": 0.003, "max_grad_norm": 1e9}).step(batch)
    assert metrics["optimizer/updates"] == 2
    assert abs(metrics["mismatch/kl"]) < 1e-5
    assert abs(metrics["drift/kl"]) > 1e-4
    assert "drift/kl" not in make_learner().step(batch)


def test_a_weighted_baseline_takes_the_mean_of_the_weights_of_all_tokens(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel
) -> None:
    """Holds for weights per token, too, where the first weight does not stand for its sequence."""
    batch = make_batch(oracle)
    learner = make_learner(correction={"level": "token", "baseline": "rloo_weighted"})
    before = learner.look(batch.episodes())
    means = []
    for scored in batch.groups:
        for sample in scored.group.samples:
            exact = oracle_logprobs(oracle, scored.group.prompt_ids.tolist(), sample.token_ids.tolist()).detach()
            w = (exact - torch.from_numpy(sample.logprobs.astype(np.float64))).exp()
            means.append(float(w.where(w <= 2, 0).mean()))
    assert len({round(mean, 3) for mean in means}) == len(means)
    got = learner.batch_advantages(batch, before).view(2, 3)
    for g, scored in enumerate(batch.groups):
        for i in range(3):
            others = [j for j in range(3) if j != i]
            weight = sum(means[3 * g + j] for j in others)
            baseline = sum(means[3 * g + j] * scored.rewards[j] for j in others) / weight
            assert float(got[g, i]) == pytest.approx(scored.rewards[i] - baseline, abs=1e-4)


@pytest.mark.parametrize("overlong", ["mask", "drop"])
def test_truncated_samples_get_no_gradient_where_overlong_says_so(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel, overlong: str
) -> None:
    batch = make_batch(oracle)
    first, *others = batch.groups[0].group.samples
    cut = make_sample(first.token_ids.tolist(), first.logprobs, finish=FinishReason.LENGTH)
    batch = Batch((make_scored([5, 9, 11], [cut, *others], [1.0, 0.0, 0.25]), batch.groups[1]))
    learner = make_learner(reward={"name": "exact_match", "overlong": overlong})
    advantages = learner.batch_advantages(batch, None).view(2, 3)
    assert advantages[0, 0] == 0
    baseline = 0.25 if overlong == "drop" else (1.0 + 0.25) / 2
    assert float(advantages[0, 1]) == pytest.approx(0.0 - baseline)


def test_a_restored_learner_goes_on_bit_for_bit(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel, tmp_path: Path
) -> None:
    straight, batch = make_learner(optimizer={"lr": 1e-3, "warmup_steps": 3}), make_batch(oracle)
    straight.step(batch)
    straight.save(tmp_path / "state")
    resumed = make_learner(optimizer={"lr": 1e-3, "warmup_steps": 3})
    resumed.load(tmp_path / "state")
    assert resumed.lr == straight.lr == pytest.approx(2e-3 / 3)
    for learner in (straight, resumed):
        learner.step(batch)
    pairs = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_gradient_that_is_not_finite_is_skipped(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel
) -> None:
    learner = make_learner()
    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    handle = next(iter(learner.model.parameters())).register_hook(lambda gradient: gradient * math.nan)
    assert learner.step(make_batch(oracle))["optimizer/updates"] == 0
    handle.remove()
    assert all(torch.equal(before[name], p) for name, p in learner.model.named_parameters())


MY_FUNCTIONS = """
import torch
from dvp_rl.dvp.advantages import advantages as rloo
from dvp_rl.dvp.objective import surrogate_loss

def advantages(rewards, *, counted):
    return rloo(rewards, counted=counted)

def level(rewards, *, counted):
    return torch.ones_like(rewards)

def objective(train_logprobs, seen, correction, advantages):
    return surrogate_loss(train_logprobs, correction.weights, advantages, seen.mask, 1.0)

def likelihood(train_logprobs, seen, correction, advantages):
    return -train_logprobs.where(correction.kept, 0.0).sum()

def row(rewards, *, counted):
    return rewards[0]

def infinite(rewards, *, counted):
    return rewards / 0

def constant(train_logprobs, seen, correction, advantages):
    return torch.tensor(1.0)

def number(train_logprobs, seen, correction, advantages):
    return 1.0

def failing(*_, **__):
    raise IndexError("list index out of range")
"""


@pytest.fixture
def my_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with the user's functions."""
    name = f"my_functions_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MY_FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_own_functions_that_say_the_same_make_the_same_step(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel, my_functions: str
) -> None:
    batch = make_batch(oracle)
    expected = make_learner().step(batch)
    own = {"baseline": f"{my_functions}:advantages", "objective": f"{my_functions}:objective"}
    assert make_learner(correction=own).step(batch) == expected


def test_groups_with_equal_rewards_reach_functions_of_the_users_own(
    make_learner: Callable[..., Learner], oracle: PreTrainedModel, my_functions: str
) -> None:
    """The method's advantages are 0 for such groups; a user's need not be."""
    level = [dataclasses.replace(scored, rewards=(1.0,) * 3) for scored in make_batch(oracle).groups]
    batch = Batch(tuple(level))
    assert make_learner().step(batch)["optimizer/updates"] == 0
    for own in ({"baseline": f"{my_functions}:level"}, {"objective": f"{my_functions}:likelihood"}):
        assert make_learner(correction=own).step(batch)["optimizer/updates"] == 1


@pytest.mark.parametrize(
    ("setting", "function", "said"),
    [
        ("baseline", "row", r"returned a tensor of shape \[3\], expected a tensor of shape \[2, 3\]"),
        ("baseline", "infinite", "returned NaN or an infinity for a counted sample"),
        ("baseline", "failing", r"correction.baseline: your function failed \(IndexError: list index out of range\)"),
        ("objective", "constant", "depends on train_logprobs"),
        ("objective", "number", "returned an object of type float, expected a tensor"),
        ("objective", "failing", r"correction.objective: your function failed \(IndexError"),
    ],
)
def test_what_a_function_of_the_users_own_may_not_return(
    make_learner: Callable[..., Learner],
    oracle: PreTrainedModel,
    my_functions: str,
    setting: str,
    function: str,
    said: str,
) -> None:
    learner = make_learner(correction={setting: f"{my_functions}:{function}"})
    with pytest.raises(ConfigError, match=said):
        learner.step(make_batch(oracle))
