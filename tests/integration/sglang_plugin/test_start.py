"""The plugin in SGLang's own processes: when it loads and when it refuses, and its wheel in a foreign environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dvp_rl.sglang_plugin.plugin import ORIGINAL_LOGPROB
from dvp_rl.sglang_plugin.versions import ANY_VERSION
from tests.kit.wheels import build_wheel, check_wheel, run

from .server import FLAGS

pytestmark = pytest.mark.slow

LAUNCH = ("-m", "sglang.launch_server")
UNTESTED = "import dvp_sglang.sglang_plugin.versions as v; v.TESTED = ('0.0.1',); "
LOAD = "from sglang.srt.plugins import load_plugins; load_plugins(); "
IN_FORKS = """
import json, os, sys
import sglang.srt.layers.sampler, sglang.srt.plugins  # the slow imports, once

codes = []
for case, (code, environment) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        output = os.open(str(case), os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        os.environ.update(environment)
        exec(code)
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""
"""Prints the exit codes of all cases; the output of each is in a file named by its number."""
IS_HOOKED = "from sglang.srt.layers.sampler import Sampler; print('hooked', hasattr(Sampler.forward, '__wrapped__'))"


def test_server_refuses_to_start_with_another_version(sglang_python: Path, tmp_path: Path) -> None:
    """SGLang would skip a plugin that raised any other exception, and log-probs would silently be stock."""
    launch = f"import runpy, sys; sys.argv[1:] = []; runpy.run_module('{LAUNCH[1]}', run_name='__main__')"
    done = run(sglang_python, "-c", UNTESTED + launch, folder=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert all(part in last for part in ("dvp-sglang", "0.5.23", "0.0.1", ANY_VERSION, "SGLANG_PLUGINS"))


def test_ways_out_of_the_refusal(sglang_python: Path, tmp_path: Path) -> None:
    """Both ways work, but allowing any version does not allow a moved sampler, which SGLang would only log."""
    moved = "import dvp_sglang.sglang_plugin.plugin as p; p.SAMPLER = p.SAMPLER.replace('forward', 'moved'); "
    cases = [
        (UNTESTED + LOAD + IS_HOOKED, {ANY_VERSION: "1"}),
        (UNTESTED + LOAD + IS_HOOKED, {"SGLANG_PLUGINS": "none"}),
        (UNTESTED + moved + LOAD, {ANY_VERSION: "1"}),
    ]
    done = run(sglang_python, "-c", IN_FORKS, json.dumps(cases), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 0, 1]
    tested, without, refused = ((tmp_path / str(case)).read_text().strip() for case in range(len(cases)))
    assert "hooked True" in tested
    assert "hooked False" in without
    last = refused.splitlines()[-1]
    assert all(part in last for part in ("sampler.Sampler.moved", "0.5.23", ANY_VERSION, "SGLANG_PLUGINS"))


def test_server_refuses_settings_under_which_log_probs_would_be_wrong(
    sglang_python: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Tests all that a CPU server has at once; tests/unit/sglang_plugin/test_hook.py tests each alone."""
    launch = (*LAUNCH, "--model-path", folders["qwen3"], *FLAGS)
    flags = ("--speculative-algorithm", "NGRAM", "--enable-watermark")
    done = run(sglang_python, *launch, *flags, folder=tmp_path, **{ORIGINAL_LOGPROB: "1"})
    assert done.returncode == 1
    named = f"does not work together with --speculative-algorithm, --enable-watermark, {ORIGINAL_LOGPROB}:"
    assert named in done.stderr.strip().splitlines()[-1]


def test_sampler_with_seeds_and_custom_processors(sglang_python: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("real_sampler.py")
    done = run(sglang_python, script, folder=tmp_path, TORCHDYNAMO_DISABLE="1")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(sglang_python, "dvp-sglang", tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_one_package_and_wants_nothing(wheel: Path) -> None:
    check_wheel(wheel, "dvp_sglang", "sglang_plugin")


def test_wheel_in_a_foreign_environment(wheel: Path, sglang_python: Path, tmp_path: Path) -> None:
    """pip changes nothing else there, and an SGLang that finds the wheel by its entry point runs the wheel's code."""
    plan = run(
        sglang_python,
        *("-m", "pip", "install", "--dry-run", "--quiet", "--report", tmp_path / "plan.json", "--force-reinstall"),
        wheel,
        folder=tmp_path,
    )
    assert plan.returncode == 0, plan.stderr
    assert (tmp_path / "plan.json").read_text().count('"download_info"') == 1
    target = tmp_path / "site"
    done = run(sglang_python, "-m", "pip", "install", "--quiet", "--target", target, wheel, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in target.iterdir() if path.suffix != ".dist-info") == ["dvp_sglang"]
    origin = "; import sys; print(sys.modules['dvp_sglang'].__file__, 'dvp_rl' in sys.modules)"
    found = run(sglang_python, "-c", LOAD + IS_HOOKED + origin, folder=tmp_path, PYTHONPATH=str(target))
    assert "hooked True" in found.stdout, found.stderr
    assert f"{target / 'dvp_sglang' / '__init__.py'} False" in found.stdout
