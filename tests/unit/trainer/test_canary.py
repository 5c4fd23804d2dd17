"""The canary of the weights in training is what these weights draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dvp_rl.contract.canary import Canary
from dvp_rl.contract.errors import ConfigError
from dvp_rl.weights.folder import read_canary
from dvp_trainer.config import TrainSettings
from dvp_trainer.learn.canary import PROMPTS, CanaryMaker, T
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner
from tests.integration.engines.oracle import Oracle
from tests.kit.models import EOS_ID, PAD_ID, make_model
from tests.kit.runs import config

WITHIN = 2e-5
"""Nats between a float32 trainer and a float64 oracle."""


def learner_of(folder: Path, tmp_path: Path, **options: Any) -> Learner:
    flags = config(tmp_path, "canary", "redis://127.0.0.1:1", model__path=str(folder), **options)
    settings = TrainSettings.load(flags)
    return Learner(load_model(settings.model), settings, PAD_ID)


def canary_of(learner: Learner) -> Canary:
    maker = CanaryMaker(learner.policy, learner.settings, PAD_ID, learner.world)
    canary = maker.make()
    assert canary is not None
    return canary


def check(folder: Path, canary: Canary, num_walks: int = len(PROMPTS)) -> None:
    """Each token is the best one, and what is said of it is true."""
    oracle = Oracle(folder)
    assert len(canary.walks) == num_walks
    for walk in canary.walks:
        assert len(walk.token_ids) == T
        logits = oracle.logits(np.array(walk.prompt_ids, np.int32), np.array(walk.token_ids, np.int32))
        assert logits.argmax(-1).tolist() == list(walk.token_ids)
        second, best = np.sort(logits)[:, -2:].T
        np.testing.assert_allclose(walk.logprobs, best - np.logaddexp.reduce(logits, -1), atol=WITHIN)
        np.testing.assert_allclose(walk.gaps, best - second, atol=WITHIN)
        inside = logits[0] - best[0] >= canary.temperature * canary.log_min_p
        assert all(fewest <= int(inside.sum()) <= most for fewest, most in walk.kept)
        assert walk.kept[0][1] - walk.kept[0][0] <= walk.kept[-1][1] - walk.kept[-1][0]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("llama", {"sampling__temperature": "0.7", "sampling__log_min_p": "-1.5"}),
        ("gemma2", {}),
        ("qwen3", {"model__fixed_shape": "4x64"}),
        ("qwen2", {"lora__rank": "2"}),
    ],
    ids=["packed", "policy", "soft caps", "fixed shape", "lora"],
)
def test_walks_are_greedy(family: str, options: dict[str, str], tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", family, spread=2.0)
    check(folder, canary_of(learner_of(folder, tmp_path, **options)))


def test_a_short_context_leaves_out_long_walks(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", context=20)
    check(folder, canary_of(learner_of(folder, tmp_path, data__max_prompt_tokens="8", sampling__max_tokens="8")), 5)


def test_it_is_written_with_the_weights_unless_switched_off(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    for switch in ("true", "false"):
        learner, version = learner_of(folder, tmp_path, weights__canary=switch), tmp_path / switch
        version.mkdir()
        learner.write_weights(version)
        assert (read_canary(version) is not None) is (switch == "true")


def test_weights_that_compute_nothing_finite_are_not_published(tmp_path: Path) -> None:
    learner = learner_of(make_model(tmp_path / "model"), tmp_path)
    with torch.no_grad():
        learner.model.get_output_embeddings().weight[5] = torch.nan
    with pytest.raises(ConfigError, match="not finite"):
        learner.write_weights(tmp_path)


def test_prompts_hold_ordinary_tokens_only(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", image_token_id=7, stop_token_id=[8, 9], unset_token_id=None)
    drawn = {token for walk in canary_of(learner_of(folder, tmp_path)).walks for token in walk.prompt_ids}
    assert len(drawn) > 30
    assert not drawn & {PAD_ID, EOS_ID, 7, 8, 9}


def test_the_next_version_begins_with_the_last_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = (make_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    learner = learner_of(folder, tmp_path)
    maker = CanaryMaker(learner.policy, learner.settings, PAD_ID, learner.world)
    reads: list[int] = []
    read = maker._read
    monkeypatch.setattr(maker, "_read", lambda: (reads.append(1), read())[1])
    first = maker.make()
    assert T // 2 <= len(reads) <= T + 1
    reads.clear()
    assert maker.make() == first
    assert len(reads) == 1
    learner.model.load_state_dict(AutoModelForCausalLM.from_pretrained(other).state_dict())
    changed = maker.make()
    assert changed is not None
    check(other, changed)
