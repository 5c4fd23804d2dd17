"""Episodes of several turns and forks against the formula in float64: drawn tokens count, all others are context."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dvp_rl.contract.group import FinishReason, Sample
from dvp_rl.contract.metrics import COUNTED, MAX_METRICS
from dvp_rl.contract.sampling import Sampling
from dvp_rl.engines.tokenizer import load_tokenizer
from dvp_trainer.config import RewardSection, TrainSettings
from dvp_trainer.data.batch import Batch, ScoredGroup
from dvp_trainer.data.prompts import Row
from dvp_trainer.data.reward_failures import RewardFailures
from dvp_trainer.data.reward_pool import RewardPool
from dvp_trainer.data.scoring import Scorer
from dvp_trainer.learn.arrangement import Arrangement, Beside
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner, batch_metrics
from dvp_trainer.report.pick import pick_completions
from tests.kit.models import make_model, use_own_norms
from tests.kit.records import make_sample, make_scored, make_turns

from .exact import LOG_MIN_P, TEMPERATURE, draw, exact_logprobs, expected_gradient, gradient_of, oracle_logprobs

VOCAB = 64
FIRST, SECOND = [5, 9, 11], [7, 8, 12, 20, 31]
"""Prompts of the two groups."""
MakeLearner = Callable[..., Learner]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, seed=3)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    use_own_norms(model)
    return model


@pytest.fixture
def make_learner(folder: Path, tmp_path: Path) -> MakeLearner:
    """Learners that compute in float64."""

    def make(beside: Beside = Beside.PACKED, micro_batch_tokens: int = 10_000, **sections: dict[str, Any]) -> Learner:
        values: dict[str, Any] = {
            "run_id": "unit",
            "out_dir": tmp_path,
            "steps": 1,
            "model": {"path": folder, "micro_batch_tokens": micro_batch_tokens},
            "data": {"train": "unused.jsonl"},
            "reward": {"name": "exact_match"},
            "sampling": {"n": 3, "log_min_p": LOG_MIN_P, "temperature": TEMPERATURE},
            "optimizer": {"lr": 1e-3, "max_grad_norm": 1e9},
        }
        settings = TrainSettings.model_validate(values | sections)
        model = load_model(settings.model).double()
        use_own_norms(model)
        learner = Learner(model, settings, pad_id=0)
        if beside is not Beside.PACKED:
            learner.policy.attend(Arrangement(beside, "sdpa"))
        assert learner.policy.shape is not None or learner.policy.arrangement.beside is beside
        return learner

    return make


def play(
    oracle: PreTrainedModel,
    prompt: Sequence[int],
    lengths: Sequence[int],
    *,
    seed: int,
    noise: float = 0.1,
    shift: float = 0.0,
    fork: bool = False,
) -> Sample:
    """Turns of these numbers of drawn tokens with an answer of the environment between two of them. The engine's
    log-probs are the oracle's with noise, and lower by `shift` in total. `fork`: the prompt is the sample's own."""
    rng, read, segments = np.random.default_rng(seed), list(prompt), list[tuple[list[int], bool]]()
    for turn, length in enumerate(lengths):
        if turn:
            segments.append((rng.integers(5, VOCAB, rng.integers(1, 5)).tolist(), False))
            read += segments[-1][0]
        segments.append((draw(oracle, read, length, seed=seed + turn), True))
        read += segments[-1][0]
    exact = oracle_logprobs(oracle, list(prompt), read[len(prompt) :]).detach().numpy()
    found, start = [], 0
    for ids, drawn in segments:
        near = exact[start : start + len(ids)] + noise * rng.standard_normal(len(ids)) - shift / sum(lengths)
        found.append((ids, np.minimum(near, 0) if drawn else None))
        start += len(ids)
    return make_turns(found, prompt_ids=list(prompt) if fork else None)


def make_batch(oracle: PreTrainedModel, **changes: float) -> Batch:
    """Two groups of three episodes: plain ones, some of several turns, and some with a fork or two. `changes` are those
    of the first group's forks. The mean of a group's rewards is exact in float32."""
    first = [
        [play(oracle, FIRST, [4], seed=1)],
        [play(oracle, FIRST, [2, 3, 1], seed=2)],
        [
            play(oracle, FIRST, [3], seed=3, **changes),
            play(oracle, [5, 30, 31, 32], [2, 2], seed=4, fork=True, **changes),
        ],
    ]
    second = [
        [
            play(oracle, SECOND, [1, 2], seed=5),
            play(oracle, [*SECOND, 40], [3], seed=6, fork=True),
            play(oracle, [9], [1], seed=7, fork=True),
        ],
        [play(oracle, SECOND, [5], seed=8)],
        [play(oracle, SECOND, [1, 1, 1], seed=9)],
    ]
    return Batch((scored(FIRST, first, [1.0, 0.0, 0.5]), scored(SECOND, second, [0.0, 0.25, 1.25])))


def scored(prompt: Sequence[int], episodes: Sequence[Sequence[Sample]], rewards: Sequence[float]) -> ScoredGroup:
    samples = [sample for episode in episodes for sample in episode]
    metrics = [{"forks": len(episode) - 1.0} | ({"luck": 2.0} if len(episode) == 1 else {}) for episode in episodes]
    return make_scored(prompt, samples, rewards, episode_sizes=[len(episode) for episode in episodes], metrics=metrics)


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert scale > 1e-5
        assert float((actual[name] - gradient).abs().max()) < 1e-10 * scale, name


@pytest.mark.parametrize("beside", list(Beside))
@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 10_000])
def test_the_gradient_is_the_estimator_over_drawn_tokens(
    make_learner: MakeLearner, oracle: PreTrainedModel, beside: Beside, micro_batch_tokens: int
) -> None:
    batch = make_batch(oracle)
    assert_equal(gradient_of(make_learner(beside, micro_batch_tokens), batch), expected_gradient(oracle, batch))


def test_grpo_compares_episodes(make_learner: MakeLearner, oracle: PreTrainedModel) -> None:
    """Its baseline includes the episode itself, so with three of them its advantages are 2/3 of RLOO's."""
    batch = make_batch(oracle)
    expected = {name: gradient * 2 / 3 for name, gradient in expected_gradient(oracle, batch).items()}
    assert_equal(gradient_of(make_learner(correction={"baseline": "grpo"}), batch), expected)


def test_the_trainer_sees_what_was_drawn_and_nothing_else(make_learner: MakeLearner, oracle: PreTrainedModel) -> None:
    """Random episodes: the log-probs of both sides are those of the drawn tokens, sample by sample."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        episodes = []
        for _ in range(4):
            prompts = [FIRST, *(rng.integers(5, VOCAB, rng.integers(1, 9)).tolist() for _ in range(rng.integers(0, 3)))]
            lengths = [rng.integers(1, 4, rng.integers(1, 5)).tolist() for _ in prompts]
            seeds = rng.integers(0, 1000, len(prompts)).tolist()
            episodes.append(
                [
                    play(oracle, prompt, length, seed=seed, fork=i > 0)
                    for i, (prompt, length, seed) in enumerate(zip(prompts, lengths, seeds, strict=True))
                ]
            )
        learner = make_learner(micro_batch_tokens=int(rng.integers(1, 100)))
        seen = learner.look(Batch((scored(FIRST, episodes, [0.0, 1.0, 2.0, 3.0]),)).episodes())
        assert seen is not None
        assert seen.rows.tolist() == [0, 1, 2, 3]
        for row, samples in enumerate(episodes):
            mask = seen.mask[row]
            assert seen.infer.logprobs[row][mask].tolist() == [p for sample in samples for p in sample.logprobs]
            exact = torch.cat([exact_logprobs(oracle, np.array(FIRST), sample) for sample in samples])
            assert float((seen.train.logprobs[row][mask] - exact.detach()).abs().max()) < 1e-12


def test_an_episode_is_kept_or_rejected_as_a_whole(make_learner: MakeLearner, oracle: PreTrainedModel) -> None:
    """Each of the two samples alone would stay below the cap of 2, their product exp(0.9) does not."""
    batch = make_batch(oracle, noise=0.0, shift=0.45)
    learner = make_learner()
    assert_equal(gradient_of(learner, batch), expected_gradient(oracle, batch))
    evidence = learner.evidence
    assert evidence is not None
    correction = learner.correct(evidence)
    logs = correction.log_ratios.where(evidence.mask, 0.0).sum(1)
    assert float(logs[2]) == pytest.approx(0.9, rel=1e-5)
    assert correction.kept_sequences.tolist() == (logs <= math.log(2)).tolist()
    kept = correction.kept_sequences.double()
    assert make_learner().step(batch)["mis/fraction"] == pytest.approx(1 - float(kept.mean()))
    assert 0 < float(kept.sum()) < 6


def test_a_token_outside_takes_all_forks_of_its_episode_out(make_learner: MakeLearner, oracle: PreTrainedModel) -> None:
    batch = make_batch(oracle)
    first, second = batch.groups
    *others, fork = first.group.samples
    logits = oracle(input_ids=torch.tensor([fork.prompt_ids.tolist()])).logits[0, -1]
    bad = make_turns([([int(logits.argmin())], [-0.5])], prompt_ids=fork.prompt_ids)
    batch = Batch((make_scored(FIRST, [*others, bad], first.rewards, episode_sizes=first.group.episode_sizes), second))
    learner = make_learner(micro_batch_tokens=1)
    assert_equal(gradient_of(learner, batch), expected_gradient(oracle, batch))
    assert make_learner().step(batch)["veto/outside"] == pytest.approx(1 / 6)


def test_metrics_count_drawn_tokens_and_episodes(make_learner: MakeLearner, oracle: PreTrainedModel) -> None:
    batch = make_batch(oracle)
    metrics = make_learner().step(batch)
    samples = [sample for scored in batch.groups for sample in scored.group.samples]
    drawn = sum(span.end - span.start for sample in samples for span in sample.versions)
    given = sum(span.end - span.start for sample in samples for span in sample.environment)
    assert batch.num_episodes == 6
    assert batch.num_model_tokens == drawn
    assert metrics["length/mean"] == pytest.approx(drawn / 6)
    assert metrics["length/environment_mean"] == pytest.approx(given / 6)
    assert metrics["episodes/forks_mean"] == pytest.approx(3 / 6)
    assert metrics["episodes/luck_mean"] == 2, "of those that have it"
    assert metrics["length/truncated_share"] == 0
    infer = np.concatenate([sample.logprobs for sample in samples]).astype(np.float64)
    assert metrics["entropy/constrained"] == pytest.approx(-infer.mean(), rel=1e-6)
    exact = torch.cat(
        [exact_logprobs(oracle, s.group.prompt_ids, own) for s in batch.groups for own in s.group.samples]
    )
    assert metrics["mismatch/kl"] == pytest.approx(float(np.mean(infer - exact.detach().numpy())), rel=1e-6)
    plain = Batch((make_scored(FIRST, [play(oracle, FIRST, [2], seed=i) for i in range(3)], [1.0, 0.0, 0.0]),))
    assert not {key for key in make_learner().step(plain) if key.startswith("episodes/") or "environment" in key}


def test_the_number_of_metrics_has_a_limit() -> None:
    """A harness may name them by chance."""
    sample = make_sample([5], [-0.5])
    metrics = [{"turns": 1.0} | {f"one_{i}_{j}": 1.0 for j in range(16)} for i in range(4)]
    batch = Batch((make_scored(FIRST, [sample] * 4, [0.0] * 4, metrics=metrics),))
    found = [key for key in batch_metrics(batch) if key.startswith("episodes/")]
    assert len(found) == MAX_METRICS + len(COUNTED)
    assert "episodes/turns_mean" in found


def test_an_episode_above_the_limit_goes_through_the_model_in_parts(
    make_learner: MakeLearner, oracle: PreTrainedModel
) -> None:
    """First all parts without a graph, for the weight of the whole; then each with a graph of its own."""
    batch = make_batch(oracle)
    episode = batch.episodes()[3]
    pairs = zip(episode.prompts, episode.samples, strict=True)
    first, second, third = (len(prompt) + len(sample.token_ids) for prompt, sample in pairs)
    assert first + second > second + third
    learner, forwards = make_learner(micro_batch_tokens=max(first, second + third)), list[tuple[int, bool]]()
    learner.policy.register_forward_hook(
        lambda module, read, own: forwards.append((read[0].input_ids.shape[1], own.logprobs.requires_grad))
    )
    learner.update([episode], torch.ones(6, dtype=torch.float64), 6)
    parts = [first - 1, second - 1 + third - 1]  # the last token of a sample is not read
    assert forwards == [(size, False) for size in parts] + [(size, True) for size in parts]


def test_forks_beyond_the_rows_of_a_fixed_shape_take_another_forward(
    make_learner: MakeLearner, folder: Path, oracle: PreTrainedModel
) -> None:
    batch, learner = make_batch(oracle), make_learner(model={"path": folder, "fixed_shape": "2x24"})
    seen = learner.look(batch.episodes())
    assert seen is not None
    for row, episode in enumerate(batch.episodes()):
        exact = torch.cat([exact_logprobs(oracle, episode.prompt_ids, sample) for sample in episode.samples]).detach()
        assert float((seen.train.logprobs[row][seen.mask[row]] - exact).abs().max()) < 1e-5


MY_OBJECTIVE = """
import torch

def objective(train_logprobs, seen, correction, advantages):
    ratio = (train_logprobs - seen.infer.logprobs).where(correction.kept, 0.0).exp()
    A = advantages.unsqueeze(-1)
    return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A).where(correction.kept, 0.0).sum()
"""


def test_an_own_objective_in_parts_is_that_of_the_whole(
    make_learner: MakeLearner, oracle: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_episodes.py").write_text(MY_OBJECTIVE)
    monkeypatch.syspath_prepend(tmp_path)
    batch, correction = make_batch(oracle), {"correction": {"objective": "my_episodes:objective"}}
    whole, parts = (gradient_of(make_learner(micro_batch_tokens=n, **correction), batch) for n in (10_000, 1))
    assert_equal(parts, whole)


def test_a_completion_is_the_last_sample_of_its_episode(
    make_learner: MakeLearner, oracle: PreTrainedModel, folder: Path
) -> None:
    batch, learner = make_batch(oracle), make_learner(report={"completions": 4})
    learner.step(batch)
    rows = [Row(0, "say it"), Row(1, "say it")]
    shown = pick_completions(batch, learner, rows, load_tokenizer(folder), updated=True)
    assert [(one.num_forks, one.num_tokens - one.num_environment) for one in shown] == [(0, 4), (0, 6), (0, 3), (2, 1)]
    turns = batch.groups[0].group.samples[1]
    exact = iter(exact_logprobs(oracle, np.array(FIRST), turns).tolist())
    expected = [round(next(exact), 4) if own else None for own in turns.is_model]
    assert shown[1].train_logprobs == expected
    assert [mass is None for mass in shown[1].kept_mass] == [value is None for value in expected]
    fork = batch.groups[1].group.samples[2]
    assert shown[3].prompt == load_tokenizer(folder).decode(fork.prompt_ids.tolist(), skip_special_tokens=False)
    assert shown[3].train_logprobs == [round(float(exact_logprobs(oracle, np.array(SECOND), fork).detach()), 4)]


def test_an_episode_ends_as_its_last_sample_does(make_learner: MakeLearner, oracle: PreTrainedModel) -> None:
    cut, whole = (make_turns([([7], [-1.0])], finish=reason) for reason in (FinishReason.LENGTH, FinishReason.STOP))
    batch = Batch((scored(FIRST, [[cut, whole], [whole, cut], [whole]], [0.0, 0.5, 1.0]),))
    assert batch.complete().tolist() == [[True, False, True]]
    assert Batch.from_bytes(batch.to_bytes()).groups[0].group == batch.groups[0].group


async def test_an_episode_gets_the_reward_of_its_last_sample(folder: Path, tmp_path: Path) -> None:
    """Soft overlong punishment looks at its last turn, of at most 4 tokens here, as max_tokens holds for each turn."""
    tokenizer, section = load_tokenizer(folder), RewardSection(name="exact_match", overlong="soft", overlong_buffer=2)
    right, wrong, tool = (tokenizer.encode(text) for text in ("7", "8", "+"))
    turn, long = (wrong, [-1.0]), (right * 4, [-1.0] * 4)
    episodes = [
        [make_turns([(wrong, [-1.0])]), make_turns([(right, [-1.0])], prompt_ids=[5])],
        [make_turns([(right, [-1.0])]), make_turns([(wrong, [-1.0])], prompt_ids=[5])],
        [make_turns([turn, (tool, None)] * 3 + [turn])],
        [make_turns([turn, (tool, None), long])],
    ]
    group = scored(FIRST, episodes, [0.0] * 4).group
    group = group.model_copy(update={"sampling": Sampling(max_tokens=4)})
    async with RewardPool("exact_match") as pool:
        scorer = Scorer(pool, tokenizer, section, RewardFailures(section, tmp_path, "answers", patience=1))
        result = await scorer.score(group, Row(0, "say it", "7"))
    assert result.rewards == (1.0, 0.0, 0.0, -1.0)


@pytest.mark.parametrize(("given", "expected"), [((0.25, None, 2.0), (0.25, 1.0, 2.0)), ((0.5, 0.0, -1.0), None)])
async def test_what_a_harness_gave_is_the_reward(
    folder: Path, tmp_path: Path, given: tuple[float | None, ...], expected: tuple[float, ...] | None
) -> None:
    tokenizer, section = load_tokenizer(folder), RewardSection(name="exact_match")
    right = tokenizer.encode("7")
    group = scored(FIRST, [[make_turns([(right, [-1.0])])]] * 3, [0.0] * 3).group.model_copy(update={"rewards": given})
    async with RewardPool("exact_match") as pool:
        scorer = Scorer(pool, tokenizer, section, RewardFailures(section, tmp_path, "answers", patience=1))
        result = await scorer.score(group, Row(0, "say it", "7"))
    assert result.rewards == (expected or given)
    assert (result.reward_s > 0) is (expected is not None)


async def test_a_harness_that_owes_rewards_is_a_failure_unless_the_episode_was_cut_off(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer, section = load_tokenizer(folder), RewardSection(name="given")
    whole = make_turns([(tokenizer.encode("7"), [-1.0])])
    cut_off = whole.model_copy(update={"finish_reason": FinishReason.LENGTH})
    group = scored(FIRST, [[whole], [whole], [cut_off]], [0.0] * 3).group
    group = group.model_copy(update={"rewards": (0.5, None, None)})
    async with RewardPool("given") as pool:
        scorer = Scorer(pool, tokenizer, section, RewardFailures(section, tmp_path, "answers", patience=9))
        await scorer.try_on([Row(0, "say it", "7")], n=2)
        result = await scorer.score(group, Row(0, "say it", "7"))
    assert (result.rewards, result.num_failed) == ((0.5, 0.0, 0.0), 1)
    assert "without a reward" in (tmp_path / "reward_error.txt").read_text()
