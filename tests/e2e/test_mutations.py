"""Takes one guarantee at a time out of the code; the tests must notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.verdict import OK, SOME_FAILED

ROOT = Path(__file__).parents[2]
PARTS = ("services", "trainer", "tests", "deploy", "pyproject.toml", "README.md")
TRANSPORT = "tests/integration/transport"
LUA = "services/dvp_rl/transport/lua"
PRELUDE, COMMIT, LOOP = f"{LUA}/prelude.lua", f"{LUA}/commit.lua", "trainer/dvp_trainer/loop.py"
MONITOR = "services/dvp_rl/monitor/app.py"


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    noticed_by: str


MUTANTS = {
    "owner check": Mutant(
        COMMIT,
        "if owner(stream, entry) ~= consumer then",
        "if false then",
        f"{TRANSPORT}/test_jobs.py::test_a_late_commit_after_the_lease_was_taken_changes_nothing",
    ),
    "dedupe key": Mutant(
        PRELUDE,
        "return state == 'done' or state == 'dead'",
        "return false",
        f"{TRANSPORT}/test_jobs.py::test_a_second_entry_of_an_ended_job_is_dropped_and_counted",
    ),
    "fencing token": Mutant(
        PRELUDE,
        "elseif newest > own then",
        "elseif false then",
        f"{TRANSPORT}/test_groups.py::test_a_fenced_trainer_changes_nothing",
    ),
    "acknowledge after checkpoint": Mutant(
        LOOP,
        """        await asyncio.to_thread(self.checkpoints.save, progress, self.learner.save)
        await self.feeder.acknowledge()
""",
        """        await self.feeder.acknowledge()
        await asyncio.to_thread(self.checkpoints.save, progress, self.learner.save)
""",
        "tests/integration/trainer/test_feeder.py::test_what_a_checkpoint_covers_is_not_trained_again",
    ),
    # The tests that notice the next two allow for rounding at the edge of a safe set, and for one look more or less.
    "a mask for each row": Mutant(
        "services/dvp_rl/engines/kv_cache.py",
        "> positions[..., None]",
        "> positions.max()",
        "tests/integration/engines/test_conformance.py::test_neighbours_change_log_probs_by_rounding_only",
    ),
    "one who asks for all viewers": Mutant(
        MONITOR,
        "poller.feed.follow(lambda: tokens.still_has(caller), caller.limited)",
        "(await poller._ask() and news async for news in poller.feed.follow())",
        "tests/integration/monitor/test_page.py::test_the_broker_does_not_feel_the_viewers",
    ),
    "a prompt that continues what earlier weights read": Mutant(
        "services/dvp_rl/engines/decoder.py",
        "self._prefixes.clear()\n        if not len(batch)",
        "if not len(batch)",
        "tests/integration/engines/test_continued_prompts.py::test_new_weights_read_everything_again",
    ),
    "samples of weights that were not examined": Mutant(
        "services/dvp_rl/rollout/worker.py",
        "await self._swap.vouch(group, num_wrong)",
        "group",
        "tests/integration/rollout/test_worker.py::test_nothing_that_wrong_weights_drew_is_committed",
    ),
    "a scope that nobody looks at": Mutant(
        "services/dvp_rl/http/guard.py",
        "caller.scope.includes(needed)",
        "caller.scope",
        "tests/integration/http/test_control.py::test_everybody_may_do_what_their_token_is_for",
    ),
    "one caller who may take all": Mutant(
        "services/dvp_rl/contract/shares.py",
        "own + more <= max(free - more, 1)",
        "more > 0",
        "tests/integration/rollout/test_callers.py",
    ),
}


def run(tree: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    path = os.pathsep.join(str(tree / folder) for folder in ("services", "trainer", "trainer/lab", "."))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the project."""
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    return tmp_path


@pytest.mark.parametrize("without", MUTANTS)
def test_the_mutants_are_of_the_code_as_it_is(without: str) -> None:
    mutant = MUTANTS[without]
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, f"{mutant.file} has changed: update the mutant"


@pytest.mark.slow
@pytest.mark.parametrize("without", MUTANTS)
def test_the_suite_notices_what_is_missing(tree: Path, without: str) -> None:
    mutant = MUTANTS[without]
    file = tree / mutant.file
    file.write_text(file.read_text().replace(mutant.old, mutant.new))
    done = run(tree, mutant.noticed_by)
    assert done.returncode == SOME_FAILED, done.stdout[-4000:]


@pytest.mark.slow
def test_nothing_is_noticed_where_nothing_is_missing(tree: Path) -> None:
    done = run(tree, *sorted({mutant.noticed_by for mutant in MUTANTS.values()}))
    assert done.returncode == OK, done.stdout[-4000:]
