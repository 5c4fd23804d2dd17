"""What `dvp-lab` refuses, and its messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dvp_lab.__main__ import app
from dvp_lab.training import Run
from dvp_rl.contract.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["rho", "--engine", "sglang-bf16"], "returns no logits under pruning"),
        (["signature", "--model", "deploy/demo/model"], "--model and --prompts belong together"),
        (["overlap", "--prompts", "deploy/demo/heldout.jsonl"], "--model and --prompts belong together"),
        (["signature", "--model", "absent", "--prompts", "absent.jsonl"], "absent"),
        (["signature", "--run", "absent"], "train it with --report.tokens-interval 1"),
        (["page", "absent.json"], "absent.json: No such file"),
        (["page", "deploy/demo/model/config.json"], "config.json: not the JSON of a study"),
    ],
)
def test_a_mistake_is_said(argv: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*argv, "--out", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_what_a_shell_exports_for_the_trainer_does_not_reach_an_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVP_TRAIN__OPTIMIZER__LR", "7")
    CliRunner().invoke(app, ["signature", "--run", str(tmp_path)])
    settings = Run(tmp_path, seed=0, steps=1, length=2, lr=1e-3).settings()
    assert settings.optimizer.lr == 1e-3
    assert "DVP_TRAIN__OPTIMIZER__LR" not in os.environ


def test_an_engine_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(app, ["signature", "--engine", "vllm"])
    assert result.exit_code == 2
    assert "transformers-bf16" in result.output
