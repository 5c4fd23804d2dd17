"""What the images install, read from their Dockerfiles, and what their README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .processes import ROOT

DOCKER = ROOT / "deploy" / "docker"


def packages(dockerfile: Path) -> dict[str, set[str]]:
    """Their names by image. Runs wanted.py as the Dockerfile does."""
    found = {}
    for extras, image in re.findall(r"wanted\.py pyproject\.toml(.*) > (\w+)\.txt", dockerfile.read_text()):
        command = [sys.executable, str(DOCKER / "wanted.py"), "pyproject.toml", *extras.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found[image] = _names(done.stdout)
    return found


def documented_variables() -> dict[str, str]:
    """The lines for .env with which a run has a harness, from deploy/docker/README.md."""
    return dict(re.findall(r"^    ([A-Z_]+)=(.+)$", (DOCKER / "README.md").read_text(), re.MULTILINE))


def pinned() -> set[str]:
    """The names of those in requirements.lock."""
    return _names((ROOT / "requirements.lock").read_text())


def _names(lines: str) -> set[str]:
    return {name.lower().replace("_", "-") for name in re.findall(r"^[\w.-]+", lines, re.MULTILINE)}
