"""Tests what `pip install` of this project installs, and that a user's own files do not get in its way."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.kit.processes import ROOT, environment
from tests.kit.wait import WITHIN_S

PIP = (sys.executable, "-m", "pip", "--quiet")
MYPY = (sys.executable, "-m", "mypy")
LAB = ROOT / "trainer" / "lab"
WHEELS = {
    ROOT: {"dvp_rl": ROOT / "services", "dvp_trainer": ROOT / "trainer"},
    LAB: {"dvp_lab": LAB},
}
"""Each project's packages and the folder that holds them."""
CLIENT_MB = 20
"""Largest installation without extras, pip aside, in MB."""
NEEDS = {
    "dvp-monitor": "services",
    "dvp-queue": "services",
    "dvp-rollout": "rollout",
    "dvp-train": "trainer",
    "dvp-weights": "services",
}
"""The extra that each program asks for if it has none."""
USER = """
from dvp_rl.client import Client

def total(client: Client) -> float:
    return sum(client.rollout(prompt="1").samples[0].logprobs)
"""
PROGRAMS = ("dvp_rl.monitor.cli", "dvp_rl.rollout", "dvp_rl.weights", "dvp_trainer", "dvp_lab")


class Environment:
    """A virtual environment in `folder` that holds the project's wheel, and what `flags` of pip make it bring."""

    def __init__(self, folder: Path, project: Path, *flags: str | Path) -> None:
        self.folder = folder
        run(*PIP, "wheel", "--no-deps", "--wheel-dir", folder, project, cwd=folder)
        run(sys.executable, "-m", "venv", "--without-pip", "environment", cwd=folder)
        (wheel,) = folder.glob("*.whl")
        self.bin = folder / "environment" / "bin"
        run(*PIP, "--python", self.bin / "python", "install", "--no-compile", *flags, wheel, cwd=folder)

    @property
    def site(self) -> Path:
        """The folder of its packages."""
        statement = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(run(self.bin / "python", "-c", statement, cwd=self.folder).strip())


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(root: Path, package: str) -> set[Path]:
    found = (path.relative_to(root) for path in (root / package).rglob("*") if path.is_file())
    return {path for path in found if "__pycache__" not in path.parts}


@pytest.mark.slow
@pytest.mark.parametrize("project", WHEELS, ids=["dvp-rl", "dvp-lab"])
def test_a_wheel_holds_packages_of_the_projects_own_name(tmp_path: Path, project: Path) -> None:
    """The wheel is installed into an environment that has nothing else. The lab does not ship with the product."""
    packages = WHEELS[project]
    installed = Environment(tmp_path, project, "--no-deps", "--no-index")
    site = installed.site
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == packages.keys()
    for package, root in packages.items():
        assert files(site, package) == files(root, package), "Lua and pages, too"
    scripts = tomllib.loads((project / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() <= {path.name for path in installed.bin.iterdir()}


@pytest.mark.slow
def test_without_extras_it_is_a_small_typed_client(tmp_path: Path) -> None:
    installed = Environment(tmp_path, ROOT, "--constraint", ROOT / "requirements.lock")
    size = sum(path.stat().st_size for path in installed.site.rglob("*") if path.is_file())
    assert size < CLIENT_MB * 10**6, sorted(path.name for path in installed.site.iterdir())
    assert f"installs the client alone, in less than {CLIENT_MB} MB" in (ROOT / "README.md").read_text()
    (tmp_path / "user.py").write_text(USER)
    run(installed.bin / "python", "user.py", cwd=tmp_path)
    run(*MYPY, "--strict", "--python-executable", installed.bin / "python", "user.py", cwd=tmp_path)

    for program, extra in NEEDS.items():
        done = subprocess.run([installed.bin / program, "--help"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        hint = rf"{program}: error: not installed: .*redis.*dvp-rl\[{extra}\] @ .*\n"
        assert re.fullmatch(hint, done.stderr)


@pytest.mark.parametrize("program", PROGRAMS)
def test_files_of_a_user_are_not_taken_for_ours(tmp_path: Path, program: str) -> None:
    """`python -m` searches the working directory first."""
    for name in ("services", "trainer", "client", "contract", "lab"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the user')")
    assert "usage" in run(sys.executable, "-m", program, "--help", cwd=tmp_path).lower()
