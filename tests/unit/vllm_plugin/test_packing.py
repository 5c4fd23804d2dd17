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
from dvp_rl.vllm_plugin.plugin import constrain, packing
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
    """The fields of vLLM's LogprobsTensors that the plugin reads."""

    selected_token_ranks: torch.Tensor


class MinP:
    """Those of its min-p processor."""

    dvp_kept: Any = None

    def __init__(self, *min_p: float) -> None:
        self.min_p = torch.tensor(min_p)[:, None]
        self.min_p_count = sum(p > 0 for p in min_p)


def sample(logits: torch.Tensor, processor: MinP, *, with_logprobs: bool = True) -> Any:
    """A step of vLLM's sampler, as far as the plugin sees it."""

    def forward(sampler: Any, logits: torch.Tensor, metadata: Any) -> Any:
        for each in metadata.logitsprocs.argmax_invariant:
            constrain(each, logits)
        ranks = torch.full((len(logits),), 7)
        return SimpleNamespace(logprobs_tensors=Tensors(ranks) if with_logprobs else None)

    metadata = SimpleNamespace(logitsprocs=SimpleNamespace(argmax_invariant=[processor]))
    return packing(forward)(None, logits, metadata).logprobs_tensors


def test_a_batch_tells_what_it_kept() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 40) * 3
    pruned = logits.clone()
    mass, count = prune(pruned, torch.full((3,), np.exp(LOG_MIN_P), dtype=torch.float32), torch.ones(3, 1))
    tensors = sample(logits, MinP(*[float(np.exp(LOG_MIN_P))] * 3))
    assert torch.equal(logits, pruned)
    assert [unpack(rank) for rank in tensors.selected_token_ranks.tolist()] == list(
        zip(mass.tolist(), count.int().tolist(), strict=True)
    )


def test_a_batch_without_min_p_keeps_its_ranks() -> None:
    logits = torch.randn(2, 5)
    before = logits.clone()
    processor = MinP(0.0, 0.0)
    processor.dvp_kept = "what an earlier batch kept"
    assert sample(logits, processor).selected_token_ranks.tolist() == [7, 7]
    assert torch.equal(logits, before)


def test_a_batch_without_log_probs_is_pruned_all_the_same() -> None:
    logits = torch.tensor([[0.0, -9.0]])
    assert sample(logits, MinP(0.1), with_logprobs=False) is None
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
