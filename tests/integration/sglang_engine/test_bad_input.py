"""Servers that cannot be used: each is refused within its timeout, with the end of its output and a remedy."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import ConfigError, UnavailableError, WeightError
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.sglang_server import Launch, Remote
from tests.integration.engines.jobs import make_job
from tests.integration.engines.servers import launch_sglang
from tests.kit.wait import until_async


def program(folder: Path, script: str) -> Path:
    """A script that takes the place of the interpreter that runs SGLang."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IEXEC)
    return file


async def test_a_server_that_never_gets_ready(models: dict[str, Path], tmp_path: Path) -> None:
    """The wait is bounded, the end of the log is shown, and no process is left."""
    python = program(tmp_path, f"echo loading since yesterday; echo $$ > '{tmp_path}/pid'; sleep 300 & wait")
    engine = SglangEngine(models["even"], Launch(python=python, ready_timeout_s=10))
    with pytest.raises(ConfigError, match=r"(?s)ready_timeout_s = 10 s.*\n  loading since yesterday"):
        await engine.start()
    assert not in_group(int((tmp_path / "pid").read_text()))
    with pytest.raises(UnavailableError):
        await engine.generate(make_job())
    await engine.close()


def in_group(leader: int) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["status"]) if p.info["status"] != "zombie" and _group(p) == leader]


def _group(process: psutil.Process) -> int:
    with suppress(ProcessLookupError):
        return os.getpgid(process.pid)
    return 0


async def test_a_start_that_is_called_off(models: dict[str, Path], tmp_path: Path) -> None:
    """`cancel` cancels repeatedly, also while the server is being stopped. None of its helpers is left."""
    written = f"echo $$ > '{tmp_path}/part'; mv '{tmp_path}/part' '{tmp_path}/pid'"  # never there without its number
    python = program(tmp_path, f"sleep 300 & {written}; wait")
    engine = SglangEngine(models["even"], Launch(python=python))
    starting = asyncio.create_task(engine.start())
    await until_async((tmp_path / "pid").exists)
    await cancel([starting])
    assert not in_group(int((tmp_path / "pid").read_text()))
    await engine.close()


async def test_a_server_that_ends_at_start(models: dict[str, Path], tmp_path: Path) -> None:
    engine = SglangEngine(models["even"], Launch(python=program(tmp_path, "echo no such GPU; exit 3")))
    with pytest.raises(ConfigError, match=r"(?s)exit code 3.*no such GPU"):
        await engine.start()
    await engine.close()


async def test_no_such_interpreter(models: dict[str, Path], tmp_path: Path) -> None:
    engine = SglangEngine(models["even"], Launch(python=tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="cannot be started with"):
        await engine.start()
    await engine.close()


async def test_an_environment_without_sglang(models: dict[str, Path]) -> None:
    engine = SglangEngine(models["even"], Launch(python=Path(sys.executable)))
    with pytest.raises(ConfigError, match=r"(?s)exit code 1.*lacks sglang and dvp_sglang: .*sglang\.python"):
        await engine.start()
    await engine.close()


async def test_a_port_that_is_taken(models: dict[str, Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = SglangEngine(models["even"], Launch(python=Path("python"), port=port))
        with pytest.raises(ConfigError, match=rf"sglang.port {port}.*or 0 for a free one"):
            await engine.start()
        await engine.close()


async def test_nobody_at_the_url(models: dict[str, Path]) -> None:
    engine = SglangEngine(models["even"], Remote("http://127.0.0.1:9", ready_timeout_s=0.5))
    with pytest.raises(ConfigError, match=r"sglang.url http://127.0.0.1:9.*ready_timeout_s = 0.5"):
        await engine.start()
    await engine.close()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "float64"}, "float64.*float32, bfloat16, float16"),
        ({"deterministic": True}, "deterministic.*GPU"),
    ],
)
def test_settings_that_sglang_does_not_have(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Launch(python=Path("python"), **settings)  # type: ignore[arg-type]


async def test_a_folder_without_safetensors(models: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(models["even"], tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    engine = SglangEngine(folder, Launch(python=Path("python")))
    with pytest.raises(ConfigError, match="pickled weights are never read"):
        await engine.start()
    await engine.close()


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (Launch(python=Path("python"), dp=2), "sglang.dp 2: .* only with dp 1; start more replicas"),
        (Remote("http://127.0.0.1:9"), "sglang.url can only load folders"),
    ],
)
def test_servers_that_cannot_be_sent_weights(source: Launch | Remote, named: str, models: dict[str, Path]) -> None:
    with pytest.raises(WeightError, match=named):
        SglangEngine(models["even"], source).transfer_request("run:1:aa")


@pytest.mark.long
async def test_a_model_that_sglang_refuses(models: dict[str, Path], tmp_path: Path) -> None:
    """The folder names an architecture that SGLang does not have."""
    folder = shutil.copytree(models["even"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchForCausalLM"]}))
    engine = SglangEngine(folder, launch_sglang())
    with pytest.raises(ConfigError, match=r"(?s)SGLang (ended|was killed).*The end of.*NoSuchForCausalLM"):
        await engine.start()
    await engine.close()
