"""What `dvp-lab` refuses, and its messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dvp_lab.__main__ import app, available
from dvp_lab.budget import Budget
from dvp_lab.engines import Engine
from dvp_lab.study import Study
from dvp_lab.training import Run
from dvp_rl.contract.errors import ConfigError
from tests.unit.lab.test_page import STUDY

MINE = ["--model", "deploy/demo/model", "--prompts", "deploy/demo/heldout.jsonl"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["rho", "--engine", "sglang-bf16"], "returns no logits under pruning"),
        (["signature", "--model", "deploy/demo/model"], "--model and --prompts belong together"),
        (["overlap", "--prompts", "deploy/demo/heldout.jsonl"], "--model and --prompts belong together"),
        (["signature", "--model", "absent", "--prompts", "absent.jsonl"], "absent"),
        (["signature", "--device", "abacus"], "device 'abacus': cannot be used here"),
        (["overlap", "--device", "cuda:99"], "device 'cuda:99': cannot be used here"),
        (["overlap", "--device", "meta"], "device 'meta': cannot be used here"),
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


@pytest.mark.parametrize(
    ("given", "steps"), [([], 40), (["--steps", "7"], 7), (MINE, None), ([*MINE, "--steps", "7"], 7)]
)
def test_the_labs_own_model_is_trained_for_a_model_of_ones_own_only_if_asked(
    given: list[str], steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[Budget | None] = []

    def rho(subject: object, engine: object, tokens: int, seed: int, budget: Budget | None, tell: object) -> Study:
        budgets.append(budget)
        return STUDY

    monkeypatch.setattr("dvp_lab.rho.rho", rho)
    monkeypatch.setattr("dvp_lab.__main__._subject", lambda *_: None)
    said = CliRunner().invoke(app, ["rho", *given, "--out", str(tmp_path)], catch_exceptions=False).output
    assert [budget and budget.steps for budget in budgets] == [steps]
    assert said.startswith("It follows.\nholds  it holds"), "the conclusion comes first"


def test_an_engine_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(app, ["signature", "--engine", "vllm"])
    assert result.exit_code == 2
    assert "transformers-bf16" in result.output


@pytest.mark.parametrize("command", ["signature", "overlap", "rho"])
def test_fp8_products_are_refused_before_any_work_where_pytorch_has_none(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", none)
    result = CliRunner().invoke(app, [command, "--engine", "transformers-fp8", "--out", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "transformers-fp8: PyTorch" in str(result.exception)
    assert "no fp8 matrix products on cpu: choose another --engine; signature and overlap" in str(result.exception)
    assert Engine.FP8 not in available(torch.device("meta"))


def test_by_default_sglang_runs_only_for_the_cpu_and_fp8_products_only_elsewhere() -> None:
    cpu, elsewhere = (available(torch.device(name)) for name in ("cpu", "meta"))
    plain = [engine for engine in Engine if not engine.is_sglang and engine is not Engine.FP8]
    assert [engine for engine in cpu if not engine.is_sglang] == plain
    assert [engine for engine in elsewhere if engine is not Engine.FP8] == plain
