"""The plugins as wheels, in the environments of the servers."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

from .wait import WITHIN_S

REPOSITORY = Path(__file__).parents[2]


def run(python: Path, *arguments: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs outside the checkout, so that only installed packages can be imported."""
    return subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def build_wheel(python: Path, project: str, folder: Path) -> Path:
    """Builds deploy/`project` in an empty folder."""
    source = REPOSITORY / "deploy" / project
    done = run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source, folder=folder)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def check_wheel(wheel: Path, package: str, plugin: str) -> None:
    """It holds one package, with the method and the plugin as they are here, and wants no other package."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        (metadata,) = [archive.read(n).decode() for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        sources = {name: archive.read(name) for name in names}
    assert {name.partition("/")[0] for name in names} == {package}
    assert "Requires-Dist" not in metadata
    for part in ("dvp", plugin):
        for file in (REPOSITORY / "services" / "dvp_rl" / part).glob("*.py"):
            assert sources[f"{package}/{part}/{file.name}"] == file.read_bytes()
