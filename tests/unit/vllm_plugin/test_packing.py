"""Kept mass and kept count in the place of a rank, and the sampler around which that happens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dvp_rl.dvp.pruning import prune
from dvp_rl.vllm_plugin.packing import pack, unpack
from dvp_rl.vllm_plugin.plugin import constrain, packing, stepping
from dvp_rl.vllm_plugin.versions import ANY_VERSION, TESTED, refusal

LOG_MIN_P = -3.0


@given(st.lists(st.tuples(st.floats(2.0**-126, 1.0, width=32), st.integers(1, 2**24)), min_size=1, max_size=5))
def test_every_mass_and_count_arrives_as_it_was(kept: list[tuple[float, int]]) -> None:
    packed = pack(torch.tensor(kept, dtype=torch.float32).T)
    assert [unpack(rank) for rank in packed.tolist()] == kept


def test_rows_without_a_set_are_zero() -> None:
    packed = pack(torch.tensor([[float("nan"), 1.0], [0.0, 3.0]]))
    assert packed[0] == 0
    assert unpack(int(packed[1])) == (1.0, 3)


class Tensors(NamedTuple):
    """Those of vLLM's LogprobsTensors."""

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor


class MinP:
    """What the plugin reads of its min-p processor."""

    dvp_kept: Any = None

    def __init__(self, *min_p: float) -> None:
        self.min_p = torch.tensor(min_p)[:, None]
        self.min_p_count = sum(p > 0 for p in min_p)


class Sampler:
    """A step of vLLM's sampler, as far as the plugin sees it. It draws token 0 in each row."""

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Tensors:
        best = logprobs.topk(num_logprobs)
        drawn = token_ids[:, None]
        indices = torch.cat((drawn, best.indices), 1).int()
        return Tensors(indices, torch.cat((logprobs.gather(-1, drawn), best.values), 1), torch.full((len(drawn),), 7))

    def forward(self, logits: torch.Tensor, metadata: Any, num_logprobs: int | None) -> Tensors | None:
        for each in metadata.logitsprocs.argmax_invariant:
            constrain(each, logits)
        drawn = torch.zeros(len(logits), dtype=torch.long)
        return None if num_logprobs is None else self.gather_logprobs(logits.log_softmax(-1), num_logprobs, drawn)


class Patched(Sampler):
    gather_logprobs = packing(Sampler.gather_logprobs, Tensors)
    forward = stepping(Sampler.forward)


def sample(logits: torch.Tensor, processor: MinP, num_logprobs: int | None = 0, kind: type[Sampler] = Patched) -> Any:
    metadata = SimpleNamespace(logitsprocs=SimpleNamespace(argmax_invariant=[processor]))
    return kind().forward(logits, metadata, num_logprobs)


@pytest.mark.parametrize("num_logprobs", [0, 2])
def test_a_batch_tells_what_it_kept(num_logprobs: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 40) * 3
    pruned = logits.clone()
    mass, count = prune(pruned, torch.full((3,), np.exp(LOG_MIN_P), dtype=torch.float32), torch.ones(3, 1))
    stock = sample(pruned.clone(), MinP(0.0), num_logprobs, Sampler)
    ours = sample(logits, MinP(*[float(np.exp(LOG_MIN_P))] * 3), num_logprobs)
    assert torch.equal(logits, pruned)
    for our, their in zip(ours[:2], stock[:2], strict=True):
        assert our.dtype == their.dtype
        assert torch.equal(our, their)
    assert [unpack(rank) for rank in ours.selected_token_ranks.tolist()] == list(
        zip(mass.tolist(), count.int().tolist(), strict=True)
    )


def test_a_batch_without_min_p_keeps_its_ranks() -> None:
    logits = torch.randn(2, 5)
    before = logits.clone()
    assert sample(logits, MinP(0.0, 0.0)).selected_token_ranks.tolist() == [7, 7]
    assert torch.equal(logits, before)


def test_log_probs_outside_of_a_step_keep_their_ranks() -> None:
    """vLLM takes those of prompts by the same method, between two steps."""
    sampler, processor, logits = Patched(), MinP(0.5, 0.5), torch.randn(2, 5)
    metadata = SimpleNamespace(logitsprocs=SimpleNamespace(argmax_invariant=[processor]))
    assert sampler.forward(logits, metadata, 0).selected_token_ranks.tolist() != [7, 7]
    drawn = torch.zeros(2, dtype=torch.long)
    assert sampler.gather_logprobs(logits.log_softmax(-1), 0, drawn).selected_token_ranks.tolist() == [7, 7]
    assert processor.dvp_kept is None


def test_a_batch_without_log_probs_is_pruned_all_the_same() -> None:
    logits = torch.tensor([[0.0, -9.0]])
    assert sample(logits, MinP(0.1), None) is None
    assert logits[0, 1] == -torch.inf


@pytest.mark.parametrize("build", ["", "+cpu", "+cu130"])
def test_builds_of_a_tested_version(build: str) -> None:
    assert refusal(TESTED[0] + build) is None


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = refusal("9.9.9")
    assert reason is not None
    assert all(part in reason for part in ("9.9.9", TESTED[0], ANY_VERSION))
    monkeypatch.setenv(ANY_VERSION, "1")
    assert refusal("9.9.9") is None
