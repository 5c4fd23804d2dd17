"""A launch passes flags that SGLang's own parser reads, and disables WebSockets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.config import WS_PROTOCOLS

from dvp_rl.engines.server_stub import refuse_websockets
from dvp_rl.engines.sglang_server import Launch
from tests.integration.engines.servers import sglang_python
from tests.kit.wait import WITHIN_S

PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
found = vars(parser.parse_args(json.loads(sys.argv[1])))
print(json.dumps({name: found[name] for name in json.loads(sys.argv[2])}))
"""


@pytest.mark.slow
def test_every_setting_arrives(tmp_path: Path) -> None:
    launch = Launch(
        python=sglang_python(),
        dtype="bfloat16",
        device="cuda",
        max_batch=7,
        tp=2,
        dp=3,
        mem_fraction_static=0.5,
        max_total_tokens=4096,
        deterministic=True,
        fp32_head=True,
        extra_args=("--schedule-policy", "fcfs", "--max-running-requests", "9"),
    )
    expected = {
        "model_path": str(tmp_path),
        "host": "127.0.0.1",
        "port": 30001,
        "weight_version": "run:0:aa",
        "load_format": "safetensors",
        "device": "cuda",
        "dtype": "bfloat16",
        "context_length": 520,
        "tp_size": 2,
        "dp_size": 3,
        "mem_fraction_static": 0.5,
        "max_total_tokens": 4096,
        "enable_deterministic_inference": True,
        "enable_fp32_lm_head": True,
        "skip_server_warmup": True,
        "schedule_policy": "fcfs",
        "max_running_requests": 9,
    }
    flags = launch.flags(tmp_path, "run:0:aa", 30001, 512)
    done = subprocess.run(
        [launch.python, "-c", PARSE, json.dumps(flags), json.dumps(list(expected))],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_websockets_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for a WebSocket would bypass SGLang's keys where a library for them is installed, as here."""

    def protocol() -> Any:
        config = uvicorn.Config(app=lambda: None)
        config.load()
        return config.ws_protocol_class

    monkeypatch.setitem(WS_PROTOCOLS, "auto", WS_PROTOCOLS["auto"])
    assert protocol() is not None
    refuse_websockets()
    assert protocol() is None
