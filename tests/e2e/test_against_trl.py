"""The comparison with TRL runs if its environment exists."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks.against_trl import PYTHON, REPOSITORY

TIMEOUT_S = 600


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="`make bench-trl` makes .trl, which downloads TRL")
def test_both_sides_train_the_same_model() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.against_trl", "--small"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for side in ("ours", "trl", "ratio"):
        assert any(line.strip().startswith(side) for line in done.stdout.splitlines()), done.stdout
