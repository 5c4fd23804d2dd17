"""A change is refused for a test that fails twice, a broken run, or too many flaky tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import verdict

ROOT = Path(verdict.__file__).parents[1]
FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist -p pytest_reportlog.plugin"}
"""Loads only the pytest plugins needed; loading all would take most of the time."""
FLAKY = """
def test_flaky_{0}():
    first = Path(__file__).with_name("seen-{0}")
    if not first.exists():
        first.touch()
        raise AssertionError("by chance")
"""
FAILING = """
def test_failing():
    raise AssertionError("always")
"""
DYING = """
def test_dying():
    os._exit(9)
"""
PASSING = """
def test_passing():
    pass
"""


def judge(folder: Path, *tests: str) -> tuple[int, list[str]]:
    """Exit code, and the lines with the findings."""
    (folder / "test_it.py").write_text("import os\nfrom pathlib import Path\n" + "".join(tests))
    (folder / "pytest.ini").touch()
    code = "from tests import verdict; verdict.GROUPS = {'all': ('-n', '1')}; verdict.main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | FEW_PLUGINS,
        capture_output=True,
        text=True,
        check=False,
    )
    # pytest prints lines that begin with FAILED, too
    lines = done.stdout[done.stdout.rindex("slowest\n") :].splitlines()
    found = [
        line.replace("test_it.py::test_", "") for line in lines if line.split(" ")[0] in ("BROKEN", "FAILED", "FLAKY")
    ]
    return done.returncode, [*found, lines[-1]]


def test_all_passed(tmp_path: Path) -> None:
    assert judge(tmp_path, PASSING) == (0, ["1 passed, 0 failed, 0 skipped"])


def test_a_test_that_passes_the_second_time_is_flaky(tmp_path: Path) -> None:
    assert judge(tmp_path, PASSING, FLAKY.format(1)) == (0, ["FLAKY flaky_1", "2 passed, 0 failed, 0 skipped"])


def test_a_test_that_fails_twice_refuses(tmp_path: Path) -> None:
    assert judge(tmp_path, PASSING, FAILING) == (1, ["FAILED failing", "1 passed, 1 failed, 0 skipped"])


def test_too_many_flaky_tests_refuse(tmp_path: Path) -> None:
    code, found = judge(tmp_path, *(FLAKY.format(i) for i in range(verdict.MAX_FLAKY + 1)))
    assert code == 1
    assert found == [*(f"FLAKY flaky_{i}" for i in range(verdict.MAX_FLAKY + 1)), "4 passed, 0 failed, 0 skipped"]


def test_a_test_that_kills_its_process_fails_alone(tmp_path: Path) -> None:
    assert judge(tmp_path, DYING, PASSING) == (1, ["FAILED dying", "1 passed, 1 failed, 0 skipped"])


def test_a_module_that_cannot_be_imported_refuses(tmp_path: Path) -> None:
    code, found = judge(tmp_path, "import nothing_of_this_name\n")
    assert code == 1
    assert "BROKEN test_it.py" in found


def test_a_group_without_tests_refuses(tmp_path: Path) -> None:
    assert judge(tmp_path) == (1, ["BROKEN pytest -n 1: exit code 5", "0 passed, 0 failed, 0 skipped"])


def test_a_run_that_fails_without_a_failed_test_refuses(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("def pytest_sessionfinish(session):\n    session.exitstatus = 1\n")
    assert judge(tmp_path, PASSING) == (1, ["BROKEN pytest -n 1: exit code 1", "1 passed, 0 failed, 0 skipped"])


def test_every_slow_test_is_in_one_group() -> None:
    """The folders that the slow group leaves out are those of the other groups."""
    left_out = {option.partition("=")[2] for option in verdict.GROUPS["slow"] if option.startswith("--ignore=")}
    named = [option for name in ("servers", "e2e") for option in verdict.GROUPS[name] if option.startswith("tests/")]
    assert sorted(left_out) == sorted(named)
    assert all((ROOT / folder).is_dir() for folder in named)
