"""Packed, padded or read one by one, the same sequences give the same log-probs, losses and gradients."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dvp_trainer.config import ModelSection, TrainSettings
from dvp_trainer.data.batch import Batch, Episode
from dvp_trainer.learn.arrangement import Arrangement, Beside
from dvp_trainer.learn.layout import SHORTEST_SHARE, packed
from dvp_trainer.learn.micro_batch import Limit, cut, micro_batches, share, tokens_of
from dvp_trainer.learn.model import Policy, load_model
from dvp_trainer.learn.step import Learner
from tests.kit.models import make_model, use_own_norms
from tests.kit.records import make_turns
from tests.unit.trainer.golden import make_batch

CPU, VOCAB = torch.device("cpu"), 96
CASES = [(family, dtype) for family in ("llama", "qwen2", "qwen3") for dtype in (torch.float64, torch.float32)]
CASES.append(("qwen3_moe", torch.float32))  # its router rounds to float32
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest accepted difference, relative to the largest value."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: make_model(root / family, family, spread=2.0)
        for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2")
    }


PADDED = Arrangement(Beside.PADDED, "sdpa")


def make_policy(folder: Path, dtype: torch.dtype, *, pack: bool = True, checkpointing: bool = False) -> Policy:
    model = load_model(ModelSection(path=folder, gradient_checkpointing=checkpointing)).to(dtype)
    if dtype is torch.float64:
        use_own_norms(model)
    policy = Policy(model, "float32", log_min_p=-4.0, temperature=0.8)
    if not pack:
        policy.attend(PADDED)
    return policy


def make_sequences(seed: int = 0, groups: int = 3, n: int = 4, longest: int = 40) -> list[Episode]:
    """Prompts of 1 to 12 tokens, each with completions of 1 to `longest`, in most of which the environment's tokens lie
    between others."""
    rng, sequences = np.random.default_rng(seed), list[Episode]()
    for _ in range(groups):
        prompt = rng.integers(5, VOCAB, rng.integers(1, 13))
        for length in rng.integers(1, longest + 1, n).tolist():
            ids = rng.integers(5, VOCAB, length).tolist()
            start, end = sorted(rng.integers(1, max(2, length), 2).tolist())
            parts = [(ids[:start], True), (ids[start:end], False), (ids[end:], True)]
            sample = make_turns([(part, [-1.0] * len(part) if drawn else None) for part, drawn in parts if part])
            sequences.append(Episode(len(sequences), prompt, (sample,)))
    return sequences


class Outcome(NamedTuple):
    logprobs: Tensor
    """Log-probs of all model tokens, sequence by sequence."""
    gradients: list[Tensor]


def outcome(policy: Policy, sequences: list[Episode], max_tokens: int) -> Outcome:
    """Log-probs, and gradients of their sum with a different coefficient for every token."""
    policy.zero_grad()
    logprobs: dict[int, Tensor] = {}
    for micro in micro_batches(sequences, policy.limit(max_tokens), pad_id=0, device=CPU):
        own = policy.read(micro).logprobs
        coefficients = torch.cat([torch.arange(1, 1 + int(n), dtype=own.dtype).sin() for n in micro.mask.sum(1)])
        (own * coefficients).sum().backward()
        parts = own.detach().split(micro.mask.sum(1).tolist())
        logprobs |= dict(zip(micro.rows.tolist(), parts, strict=True))
    gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    return Outcome(torch.cat([logprobs[row] for row in sorted(logprobs)]), gradients)


def assert_same(actual: Outcome, expected: Outcome) -> None:
    tolerance = TOLERANCE[expected.logprobs.dtype]
    assert float((actual.logprobs - expected.logprobs).abs().max()) < tolerance * float(expected.logprobs.abs().max())
    for gradient, other in zip(actual.gradients, expected.gradients, strict=True):
        scale = float(other.abs().max())
        assert scale > 0
        assert float((gradient - other).abs().max()) < 10 * tolerance * scale


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_packed_is_padded_is_one_by_one(folders: dict[str, Path], family: str, dtype: torch.dtype) -> None:
    sequences = make_sequences()
    packing, padding = (make_policy(folders[family], dtype, pack=pack) for pack in (True, False))
    assert packing.arrangement.beside is Beside.PACKED
    alone = outcome(padding, sequences, max_tokens=1)
    assert len(alone.logprobs) == sum(s.samples[0].num_model_tokens for s in sequences)
    for policy, max_tokens in ((packing, 10_000), (packing, 100), (packing, 1), (padding, 10_000), (padding, 100)):
        assert_same(outcome(policy, sequences, max_tokens), alone)


def test_the_order_of_packed_sequences_is_free(folders: dict[str, Path]) -> None:
    policy, sequences = make_policy(folders["qwen3"], torch.float64), make_sequences(seed=1)
    shuffled = [sequences[i] for i in np.random.default_rng(0).permutation(len(sequences))]
    assert_same(outcome(policy, shuffled, 10_000), outcome(policy, sequences, 10_000))


@pytest.mark.parametrize("pack", [True, False])
def test_gradient_checkpointing_changes_nothing(folders: dict[str, Path], pack: bool) -> None:
    plain, checkpointed = (
        make_policy(folders["qwen3"], torch.float64, pack=pack, checkpointing=flag) for flag in (False, True)
    )
    assert_same(outcome(checkpointed, make_sequences(), 10_000), outcome(plain, make_sequences(), 10_000))


def test_a_model_with_its_own_attention_is_padded(folders: dict[str, Path]) -> None:
    policy = make_policy(folders["gemma2"], torch.float32)
    assert policy.arrangement == Arrangement(Beside.PADDED, "eager")
    sequences = make_sequences()
    assert_same(outcome(policy, sequences, 10_000), outcome(policy, sequences, 1))


def test_a_window_that_may_bind_is_padded_and_one_that_cannot_is_packed(tmp_path: Path) -> None:
    for window, beside in ((64, Beside.PADDED), (256, Beside.PACKED)):
        kinds = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
        folder = make_model(tmp_path / str(window), "qwen2", context=256, sliding_window=window, **kinds)
        assert make_policy(folder, torch.float32).arrangement.beside is beside


def test_a_packed_row_holds_every_prompt_once_and_no_padding() -> None:
    sequences = make_sequences()
    layout = packed([tokens for s in sequences for tokens in tokens_of(s)], CPU)
    prompts = {s.prompt_ids.tobytes(): len(s.prompt_ids) for s in sequences}
    read = sum(len(s.samples[0].token_ids) - 1 for s in sequences)
    assert layout.input_ids.shape == layout.position_ids.shape == (1, sum(prompts.values()) + read)


def test_attention_pads_to_rows_of_like_length() -> None:
    sequences = make_sequences(groups=20, longest=300)
    layout = packed([tokens for s in sequences for tokens in tokens_of(s)], CPU)
    assert layout.packed_rows is not None
    blocks = layout.packed_rows.blocks
    used = sum(s.num_tokens - 1 for s in sequences)
    assert sum(map(len, blocks)) == len(sequences)
    assert used > SHORTEST_SHARE * sum(block.numel() for block in blocks)


@pytest.mark.parametrize("beside", [Beside.PACKED, Beside.PADDED])
def test_micro_batches_hold_every_sequence_once_within_their_limit(beside: Beside) -> None:
    sequences, limit = make_sequences(groups=20), 120
    parts = [sequences[some] for some in cut([tokens_of(s) for s in sequences], Limit(beside, limit))]
    assert [s for part in parts for s in part] == sequences
    assert len(parts) < len(sequences) / 2

    def size(part: list[Episode]) -> int:
        if beside is Beside.PACKED:
            return sum(s.num_tokens for s in part)
        return len(part) * (max(len(s.prompt_ids) for s in part) + max(len(s.samples[0].token_ids) for s in part))

    assert all(size(part) <= limit or len(part) == 1 for part in parts)
    assert all(size([*part, after[0]]) > limit for part, after in pairwise(parts))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_ranks_share_tokens_about_equally(size: int) -> None:
    sequences = make_sequences(groups=20)
    shares = [share(sequences, rank, size) for rank in range(size)]
    assert [s for part in shares for s in part] == sequences
    tokens = [sum(s.num_tokens for s in part) for part in shares]
    assert max(tokens) - min(tokens) <= 2 * max(s.num_tokens for s in sequences)


def test_a_step_is_the_same_packed_and_padded(folders: dict[str, Path], tmp_path: Path) -> None:
    """Losses, gradient norms and all other metrics of several optimizer steps agree."""

    def train(pack: bool) -> list[dict[str, float]]:
        settings = TrainSettings.model_validate(
            {
                "run_id": "layout",
                "out_dir": tmp_path,
                "steps": 3,
                "model": {"path": folders["qwen3"], "micro_batch_tokens": 64},
                "data": {"train": "unused.jsonl"},
                "reward": {"name": "exact_match"},
                "sampling": {"n": 4},
                "correction": {"cap": 4.0},
            }
        )
        learner, rng = Learner(load_model(settings.model), settings, pad_id=0), np.random.default_rng(0)
        if not pack:
            learner.policy.attend(PADDED)
        batches: list[Batch] = [make_batch(rng) for _ in range(3)]
        return [learner.step(batch) for batch in batches]

    for one, other in zip(train(True), train(False), strict=True):
        assert one["grad/norm"] > 0
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
