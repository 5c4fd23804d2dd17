"""Tests what `pip install` of this project installs, and that a user's own files do not get in its way."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.kit.processes import ROOT, environment
from tests.kit.wait import WITHIN_S

LAB = ROOT / "trainer" / "lab"
WHEELS = {
    ROOT: {"dvp_rl": ROOT / "services", "dvp_trainer": ROOT / "trainer"},
    LAB: {"dvp_lab": LAB},
}
"""Each project's packages and the folder that holds them."""
PROGRAMS = ("dvp_rl.monitor.cli", "dvp_rl.rollout", "dvp_rl.weights", "dvp_trainer", "dvp_lab")


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
    pip = (sys.executable, "-m", "pip", "--quiet")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, project, cwd=tmp_path)
    run(sys.executable, "-m", "venv", "--without-pip", "environment", cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    python = tmp_path / "environment" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)

    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == packages.keys()
    for package, root in packages.items():
        assert files(site, package) == files(root, package), "Lua and pages, too"
    scripts = tomllib.loads((project / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() <= {path.name for path in python.parent.iterdir()}


@pytest.mark.parametrize("program", PROGRAMS)
def test_files_of_a_user_are_not_taken_for_ours(tmp_path: Path, program: str) -> None:
    """`python -m` searches the working directory first."""
    for name in ("services", "trainer", "client", "contract", "lab"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the user')")
    assert "usage" in run(sys.executable, "-m", program, "--help", cwd=tmp_path).lower()
