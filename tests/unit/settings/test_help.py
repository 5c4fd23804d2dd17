"""What the programs say of themselves: --help, --version, a bare command, a missing package."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
from pydantic import BaseModel

from dvp_rl import extras
from dvp_rl.contract.errors import ConfigError
from dvp_rl.monitor.settings import MonitorSettings, QueueSettings
from dvp_rl.rollout.settings import RolloutSettings
from dvp_rl.settings import Settings, _section
from dvp_rl.weights.settings import WeightServerSettings
from dvp_trainer.config import (
    CheckSettings,
    CompareSettings,
    EvalSettings,
    ExportSettings,
    ReportSettings,
    TrainSettings,
)
from tests.kit.processes import ROOT
from tests.kit.runs import MODEL

TRAINERS = (TrainSettings, EvalSettings, CheckSettings, ExportSettings, ReportSettings, CompareSettings)
ALL = (*TRAINERS, RolloutSettings, MonitorSettings, QueueSettings, WeightServerSettings)
REQUIRED = {"run_id": "a", "out_dir": "o", "steps": "1", "model.path": "m", "data.train": "d", "reward.name": "math"}
BIN = Path(sys.executable).parent


def helped(kind: type[Settings], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        kind.load(["--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def options(page: str) -> dict[str, str]:
    """Every option on the page with its text, in one line."""
    parts = re.split(r"^  (--?[a-z][\w.-]*)", page.partition("\nEach option is also")[0], flags=re.MULTILINE)
    return {name: " ".join(text.split("\n\n")[0].split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def settings_of(kind: type[BaseModel], path: str = "") -> Iterator[tuple[str, str | None]]:
    """Every setting with its description."""
    for name, field in kind.model_fields.items():
        section = _section(field)
        if section is None:
            yield f"{path}{name}", field.description
        else:
            yield from settings_of(section, f"{path}{name}.")


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_setting_is_described_with_its_default(kind: type[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    page = helped(kind, capsys)
    found = options(page)
    for name, description in settings_of(kind):
        assert description, f"{name} has no docstring"
        option = f"--{name.replace('_', '-')}"
        if f"\npositional arguments:\n  {name.upper()} " in page:
            continue
        text = found[option]
        # Where a default is left out, the description gives it, or it is an empty secret.
        assert re.search(r"\((default: .+|required)\)$|Default:|SECRET", text), f"{option} hides its default: {text}"
    assert max(map(len, page.splitlines())) <= 80
    for python in ("tuple[", "str]", "SecretStr", "default factory", " Path", "(default: )", "(default: True)"):
        assert python not in page


def test_the_page_of_the_trainer_begins_with_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    page = helped(TrainSettings, capsys)
    usage = page.partition("\n\n")[0]
    for command in (
        "CONFIG",
        "doctor CONFIG",
        "up CONFIG",
        "[up] eval CONFIG",
        "check MODEL",
        "export RUN --to FOLDER",
        "compare RUN RUN",
    ):
        assert f"dvp-train {command}" in usage
    assert "usage: dvp-train [up] eval CONFIG [--step STEP]" in helped(EvalSettings, capsys)
    assert "usage: dvp-train export RUN --to FOLDER" in helped(ExportSettings, capsys)


def test_switches_are_shown_and_taken_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    found = options(helped(TrainSettings, capsys))
    assert found["--resume"].startswith(", --no-resume Resume from")
    assert found["--resume"].endswith("(default: on)")
    assert found["--deterministic"].startswith("Makes the run")
    assert found["--deterministic"].endswith("(default: off)")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in REQUIRED.items()]
    for switches, expected in (
        ([], (True, False, True)),
        (["--no-resume", "--model.fp32-head", "--no-report.html"], (False, True, False)),
        (["--resume", "--no-model.fp32-head", "--report.html"], (True, False, True)),
        (["--no-resume", "--resume", "--model.fp32-head", "--no-model.fp32-head"], (True, False, True)),
    ):
        settings = TrainSettings.load([*flags, *switches])
        assert (settings.resume, settings.model.fp32_head, settings.report.html) == expected
    with pytest.raises(ConfigError, match=r"unknown option --no-resum; did you mean"):
        TrainSettings.load([*flags, "--no-resum"])


@pytest.mark.parametrize("command", ["dvp-train", "dvp-train eval", "dvp-train export", "dvp-rollout", "dvp-weights"])
def test_a_bare_command_says_what_to_do(command: str) -> None:
    program, *arguments = command.split()
    done = subprocess.run([BIN / program, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    if command in ("dvp-train", "dvp-train eval"):
        assert "name a configuration file, as in `dvp-train CONFIG.toml`" in done.stderr
        assert "run_id" not in done.stderr
    else:
        assert "required: " in done.stderr


@pytest.mark.parametrize("program", ["dvp-train", "dvp-rollout", "dvp-monitor", "dvp-weights", "dvp-queue", "dvp-lab"])
def test_the_version(program: str) -> None:
    done = subprocess.run([BIN / program, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dvp-rl {extras.version()}\n", "")


def _environment(folder: Path, *without: str) -> Path:
    """A folder with the metadata of all packages here but those, which is what `require` looks at."""
    for package in distributions():
        if package.name.lower() not in without:
            metadata = folder / f"{package.name.replace('-', '_')}-{package.version}.dist-info" / "METADATA"
            metadata.parent.mkdir(exist_ok=True)
            metadata.write_text(package.read_text("METADATA") or "")
    return folder


@pytest.mark.parametrize(
    ("program", "extra", "without"),
    [
        ("dvp_rl.commands:monitor", "services", ["numpy", "uvicorn"]),
        ("dvp_rl.commands:queue", "services", ["redis"]),
        ("dvp_rl.commands:weights", "services", ["fastapi"]),
        ("dvp_rl.commands:rollout", "rollout", ["jinja2"]),
        ("dvp_trainer.command:train", "trainer", ["matplotlib", "redis", "torch"]),
    ],
)
def test_missing_packages_are_one_line_that_says_how_to_install_them(
    tmp_path: Path, program: str, extra: str, without: list[str]
) -> None:
    module, name = program.split(":")
    path = (_environment(tmp_path, *without), ROOT / "services", ROOT / "trainer")
    command = [sys.executable, "-S", "-c", f"from {module} import {name}; {name}()"]  # -S: without this environment
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(map(str, path))})
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith(f"dvp-{name}: error: not installed: {', '.join(without)}. ")
    assert line.endswith(f" -m pip install 'dvp-rl[{extra}]'")


def test_a_replica_without_torch_says_how_to_install_it() -> None:
    program = f"""
import sys
sys.modules["torch"] = None
from dvp_rl.rollout.__main__ import main
main(["--model={MODEL}"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line == f"dvp-rollout: error: engine 'transformers' needs torch: {extras.pip_install('torch')}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        ({}, "'dvp-rl[lora]'"),
        ({"url": "file:///my%20code/dvp", "dir_info": {"editable": True}}, "-e '/my code/dvp[lora]'"),
        ({"url": "file:///code/dvp", "dir_info": {}}, "'/code/dvp[lora]'"),
        ({"url": "file:///w/dvp_rl-1.whl", "archive_info": {}}, "'dvp-rl[lora] @ file:///w/dvp_rl-1.whl'"),
        (
            {"url": "https://host/dvp.git", "vcs_info": {"vcs": "git", "commit_id": "0123"}},
            "'dvp-rl[lora] @ git+https://host/dvp.git@0123'",
        ),
    ],
)
def test_an_extra_is_added_from_where_the_project_was_installed(
    origin: dict[str, dict[str, object]], requirement: str
) -> None:
    assert extras._requirement("lora", origin) == requirement
