"""Common modules, and programs that only answer --help, must not import heavy packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "redis", "fastapi", "httpx", "numpy")
PACKAGES = ("deploy.demo", "dvp_rl.monitor", "dvp_rl.rollout", "dvp_rl.weights", "dvp_trainer", "dvp_lab")
PROGRAMS = ("dvp_rl.monitor.cli", *(f"{package}.__main__" for package in PACKAGES))


def _imported_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_contract_imports_without_heavy_packages() -> None:
    modules = ("arrays", "errors", "group", "http", "job", "keys", "record", "sampling", "weights")
    assert _imported_by(f"from dvp_rl.contract import {', '.join(modules)}") == set()


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_answer_help_without_torch(program: str) -> None:
    assert _imported_by(f"import {program}") & {"torch", "transformers", "fastapi"} == set()


@pytest.mark.parametrize("arguments", [["signature", "--help"], ["collapse", "--sed", "1"]])
def test_the_commands_of_the_lab_do_so_too(arguments: list[str]) -> None:
    program = f"""
from contextlib import suppress
from dvp_lab.__main__ import app
with suppress(SystemExit):
    app({arguments!r})
"""
    assert _imported_by(program) & {"torch", "transformers"} == set()


def test_a_trainer_speaks_before_it_loads_anything_heavy(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["torch"] = None
from dvp_trainer.__main__ import main
main()
"""
    command = [sys.executable, "-c", program, "deploy/demo/config.toml", f"--out-dir={tmp_path}", "--run-id=mine"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert re.search(rf"mine in {tmp_path}: loading PyTorch.*import of torch halted", done.stderr, re.DOTALL)
    assert _imported_by("import dvp_trainer.__main__") == set()


@pytest.mark.parametrize("module", ["health", "groups", "jobs", "submission", "embedded"])
def test_transport_needs_redis_only(module: str) -> None:
    assert _imported_by(f"import dvp_rl.transport.{module}") <= {"redis"}


def test_clients_monitor_and_weight_server_run_without_model_libraries() -> None:
    """Their image has none, so every module of theirs is imported with those blocked."""
    program = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors"))
for name in ("client", "contract", "http", "monitor", "transport", "weights"):
    package = importlib.import_module(f"dvp_rl.{name}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name not in ("dvp_rl.weights.layout", "dvp_rl.weights.pieces"):  # for those who load or send weights
            importlib.import_module(module.name)
            print(module.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 50
