"""The layout of sequences is chosen by trial: every family's log-probs in training equal the oracle's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines import reference
from dvp_rl.engines.context import edges, rope_limit
from dvp_trainer.data.batch import Episode
from dvp_trainer.learn.arrangement import Beside, arrange, trials
from tests.kit.families import small_config, small_model, write_small_model
from tests.kit.processes import ROOT
from tests.kit.records import make_turns
from tests.models import CASES, LONGROPE, REFUSED, ROPE_LIMIT, WINDOW, WINDOWS, Case, logprob_error, make_learner, table

CLOSE = 1e-4
"""Largest accepted error of a log-prob, in nats. Wrong layouts were off by 0.1 or more."""
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # gpt_bigcode's own
TRAINED = [case for case in CASES if case.trained != REFUSED]


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_training_sees_what_the_oracle_sees(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_small_model(tmp_path / "model", case.family, **case.overrides)
    with caplog.at_level(logging.INFO, logger="dvp_trainer.learn.arrangement"):
        learner = make_learner(folder)
    assert logprob_error(learner, folder) < CLOSE
    assert str(learner.policy.arrangement) == case.trained
    assert f"sequences are {case.trained}" in caplog.text


def test_the_table_of_the_readme_is_of_these() -> None:
    assert table(CASES) in (ROOT / "README.md").read_text()


def test_a_model_whose_tokens_see_those_after_them_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bert cannot be trained: later tokens change a token's hidden state"):
        arrange(small_model("bert"), packable=True)


def test_capped_attention_needs_the_plain_formula_whatever_the_weights_show() -> None:
    refusals = {str(trial.arrangement): trial.refusal for trial in trials(small_model("gemma2"), packable=True)}
    assert [name for name, refusal in refusals.items() if "capped" in refusal] == ["packed", "padded", "alone"]
    assert refusals["padded, eager attention"] == ""


def test_what_is_too_long_to_be_tried_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reference.OPERATIONS, "cpu", 1e6)
    model = small_model("mistral", sliding_window=WINDOW)
    assert arrange(model, packable=True).beside is Beside.ALONE
    refusals = [trial.refusal for trial in trials(model, packable=True) if trial.arrangement.beside is not Beside.ALONE]
    assert all(f"its layers change at {WINDOW} tokens" in refusal for refusal in refusals)
    assert arrange(small_model("mistral", sliding_window=None), packable=True).beside is Beside.PACKED


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("llama", {}, []),
        ("mistral", {"sliding_window": 16}, [16]),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, []),
        ("gemma3", {"text_config": small_config("gemma3_text", **WINDOWS).to_dict()}, [16]),
        ("llama4_text", {"attention_chunk_size": 32}, [32]),
        ("gpt_neo", {"window_size": 24}, [24]),
    ],
)
def test_edges_are_read_from_the_part_that_is_about_text(
    family: str, overrides: dict[str, Any], expected: list[int]
) -> None:
    assert edges(small_config(family, **overrides)) == expected


def test_the_limit_of_a_rope_that_changes() -> None:
    assert rope_limit(small_config("llama")) is None
    assert rope_limit(small_config("gemma3_text", **WINDOWS)) is None
    assert rope_limit(small_config("phi3", **LONGROPE)) == ROPE_LIMIT
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    assert rope_limit(small_config("llama", **dynamic)) == 128


def test_sequences_that_could_outgrow_their_rope_are_refused(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "model", "phi3", **LONGROPE)
    for data, sampling, told in (
        ({"max_prompt_tokens": 40}, {"max_tokens": 24}, None),
        ({"max_prompt_tokens": 41}, {"max_tokens": 24}, r"41 \+ 24"),
        ({"max_prompt_tokens": None}, {"max_tokens": 24}, "not set"),
    ):
        if told is None:
            make_learner(folder, data={"train": "x"} | data, sampling=sampling)
        else:
            with pytest.raises(ConfigError, match=rf"phi3: .* more than {ROPE_LIMIT} tokens.*{told}"):
                make_learner(folder, data={"train": "x"} | data, sampling=sampling)


def test_an_episode_that_has_outgrown_its_rope_is_refused(tmp_path: Path) -> None:
    """Tokens of the environment and a fork's prompt are in no setting; a long sequence would change its neighbours."""
    folder = write_small_model(tmp_path / "model", "phi3", **LONGROPE)
    learner = make_learner(folder, data={"train": "x", "max_prompt_tokens": 8}, sampling={"n": 2, "max_tokens": 4})
    for num_given, prompt_ids in ((ROPE_LIMIT - 4, [5] * 2), (1, [5] * (ROPE_LIMIT - 3))):
        fitting, longer = (
            make_turns([([6], [-1.0]), ([7] * (num_given + more), None), ([8], [-1.0])], prompt_ids=prompt_ids)
            for more in (0, 1)
        )
        assert learner.look([Episode(0, np.array([5]), (fitting,))]) is not None
        with pytest.raises(ConfigError, match=f"{len(prompt_ids)} \\+ {num_given + 3} tokens.* more than {ROPE_LIMIT}"):
            learner.look([Episode(0, np.array([5]), (fitting, longer))])


def test_code_that_mixes_dtypes_is_refused_at_start(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "model", "mamba")
    with pytest.raises(ConfigError, match=r"model.compute_dtype = 'bfloat16': model type mamba cannot compute in it"):
        make_learner(folder, model={"path": folder, "compute_dtype": "bfloat16"})
