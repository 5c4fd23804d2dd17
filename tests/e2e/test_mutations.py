"""Taking out one promise at a time: the tests have to notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("services", "trainer", "tests", "deploy", "pyproject.toml", "README.md")
TRANSPORT = "tests/integration/transport"
SELECTION = (
    *(f"{TRANSPORT}/{name}.py" for name in ("test_jobs", "test_groups", "test_lease", "test_submission")),
    "tests/integration/trainer/test_feeder.py",
)
PRELUDE, COMMIT, LOOP = "services/transport/lua/prelude.lua", "services/transport/lua/commit.lua", "trainer/loop.py"


class Mutant(NamedTuple):
    file: str
    old: str
    new: str


MUTANTS = {
    "nothing": Mutant(LOOP, "", ""),
    "owner check": Mutant(COMMIT, "if owner(JOBS, REPLICA_GROUP, entry) ~= consumer then", "if false then"),
    "dedupe key": Mutant(PRELUDE, "return state == 'done' or state == 'dead'", "return false"),
    "fencing token": Mutant(PRELUDE, "elseif newest ~= token then", "elseif false then"),
    "acknowledge after checkpoint": Mutant(
        LOOP,
        """        await asyncio.to_thread(self.checkpoints.save, progress, self.learner.save)
        await self.feeder.acknowledge()
""",
        """        await self.feeder.acknowledge()
        await asyncio.to_thread(self.checkpoints.save, progress, self.learner.save)
""",
    ),
}


def run_selection(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SELECTION]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("without", MUTANTS)
def test_the_suite_notices_what_is_missing(tmp_path: Path, without: str) -> None:
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    mutant = MUTANTS[without]
    file = tmp_path / mutant.file
    text = file.read_text()
    assert text.count(mutant.old) == 1 or not mutant.old, f"{mutant.file} has changed: write the mutant anew"
    file.write_text(text.replace(mutant.old, mutant.new) if mutant.old else text)
    done = run_selection(tmp_path)
    # 0: all passed, 1: some failed; anything else is no verdict.
    assert done.returncode == (0 if without == "nothing" else 1), done.stdout[-4000:]
