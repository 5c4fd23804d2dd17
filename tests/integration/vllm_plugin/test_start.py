"""The plugin in vLLM's own processes: when it refuses, and its wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from dvp_rl.vllm_plugin.versions import ANY_VERSION
from tests.integration.engines.servers import vllm_python
from tests.kit.wheels import build_wheel, check_wheel, run

pytestmark = pytest.mark.slow

UNTESTED = "import dvp_vllm.vllm_plugin.versions as v; v.TESTED = ('0.0.1',); "
SERVER = "vllm.entrypoints.openai.api_server"
SERVE = f"import runpy, sys; sys.argv[1:] = []; runpy.run_module('{SERVER}', run_name='__main__')"
LOAD = "from vllm.plugins import load_general_plugins; load_general_plugins(); "
IS_HOOKED = "from vllm.v1.sample.sampler import Sampler; print('hooked', hasattr(Sampler.forward, '__wrapped__'))"


def test_server_refuses_to_start_with_another_version(tmp_path: Path) -> None:
    """vLLM would skip a plugin that raised any other exception, and ranks would not be what they are taken for."""
    done = run(vllm_python(), "-c", UNTESTED + SERVE, folder=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert all(part in last for part in ("dvp-vllm", "0.32.0", "0.0.1", ANY_VERSION))


def test_another_version_that_is_allowed(tmp_path: Path) -> None:
    done = run(vllm_python(), "-c", UNTESTED + LOAD + IS_HOOKED, folder=tmp_path, **{ANY_VERSION: "1"})
    assert "hooked True" in done.stdout, done.stderr


def test_wheel_holds_one_package_and_wants_nothing(tmp_path: Path) -> None:
    check_wheel(build_wheel(vllm_python(), "dvp-vllm", tmp_path), "dvp_vllm", "vllm_plugin")
