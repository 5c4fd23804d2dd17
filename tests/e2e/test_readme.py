"""Runs every code block of README.md.

The words after the language in a fence's first line say how:

    (nothing)        run in the foreground; a failure fails the test
    serve            started in the background for the blocks after it; the test substitutes free ports for 8000 and
                     8080, and a broker that knows the run for redis://127.0.0.1:6379/0
    slow             run by the slow tests, as short as possible (SHORTER)
    file=NAME        the block is the contents of that file
    needs=gpu,hub    tried as far as possible: our commands and TOML files with --dry-run, other commands with --help
    needs=docker     likewise; skipped without docker compose; test_compose.py tests the effects of these commands
    needs=demo       run by the slow tests, after a short demo
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dvp_rl.client import Client
from dvp_rl.contract.errors import DvpError
from dvp_rl.transport.broker import Broker
from tests.kit.ports import free_port
from tests.kit.wait import WITHIN_S, until

from .stack import require_compose

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIAGRAMS = {"mermaid", "text"}
NEEDS = {"gpu", "hub", "docker"}
DEMO = {"needs": "demo"}
SHORTER = {
    "make demo": "ARGS=--steps=12",  # test_demo.py runs it to its end
    "make test": "ARGS=--collect-only",  # a test that ran all tests would run itself
}


class Block(NamedTuple):
    language: str
    marks: dict[str, str]
    text: str
    line: int

    @property
    def name(self) -> str:
        return f"line-{self.line}-{self.language}"


def read_blocks(markdown: str) -> list[Block]:
    """Every fenced block that is code."""
    blocks = []
    for match in FENCE.finditer(markdown):
        language, *marks = match[1].split() or [""]
        line = markdown.count("\n", 0, match.start()) + 1
        if language not in DIAGRAMS:
            blocks.append(Block(language, dict(mark.partition("=")[::2] for mark in marks), match[2], line))
    return blocks


BLOCKS = read_blocks((REPOSITORY / "README.md").read_text())
SLOW = [block for block in BLOCKS if "slow" in block.marks or block.marks == DEMO]
FAST = [block for block in BLOCKS if block not in SLOW]


class Reader:
    """Follows the page in its own folder, which looks like a clone. A block finds the files and running servers that
    the page made before it."""

    def __init__(self, folder: Path, broker_url: str) -> None:
        self.folder, self.broker_url = folder, broker_url
        self.ports = {"8000": str(free_port()), "8080": str(free_port())}
        self.servers: list[subprocess.Popen[bytes]] = []
        self._made: set[str] = set()
        for name in ("deploy", "tests"):
            (folder / name).symlink_to(REPOSITORY / name)
        (folder / ".venv").symlink_to(sys.prefix)

    def run(self, block: Block) -> None:
        if block.marks == DEMO:
            for earlier in SLOW[: SLOW.index(block) + 1]:
                if earlier.marks == DEMO and earlier.name not in self._made:
                    self._run(earlier)
            return
        for earlier in FAST[: FAST.index(block)] if block in FAST else ():
            if {"file", "serve"} & earlier.marks.keys() and earlier.name not in self._made:
                self._run(earlier)
        self._run(block)

    def _run(self, block: Block) -> None:
        if block.marks == DEMO and not (self.folder / "runs/demo").exists():
            self._succeed([sys.executable, "-m", "deploy.demo", "--steps=12"], prints=True)
        self._made.add(block.name)
        if "file" in block.marks:
            (self.folder / block.marks["file"]).write_text(block.text)
        match block:
            case Block(marks={"needs": needs}) if needs != "demo":
                assert set(needs.split(",")) <= NEEDS, f"{block.name}: unknown need in {needs!r}"
                self._try(block)
            case Block(language="bash", marks={"serve": _}):
                self._serve(block)
            case Block(language="bash"):
                self._succeed(["bash", "-euo", "pipefail", "-c", self._adapt(block.text)], prints=True)
            case Block(language="python", marks=marks):
                self._succeed([sys.executable, "-c", self._adapt(block.text)], prints="file" not in marks)
            case _:
                pytest.fail(f"{block.name}: nothing here knows how to run this block; mark it, or teach the test")

    def _try(self, block: Block) -> None:
        if block.language == "toml":
            return self._succeed([str(BIN / "dvp-train"), block.marks["file"], "--dry-run"], prints=True)
        assert block.language == "bash", f"{block.name}: cannot be tried"
        if "docker" in block.marks["needs"]:
            require_compose()
        for line in block.text.splitlines():
            self._succeed(attempt(shlex.split(self._adapt(line))), prints=True)
        return None

    def _serve(self, block: Block) -> None:
        command = shlex.split(self._adapt(block.text))
        log = self.folder / f"{block.name}.log"
        with log.open("wb") as out:
            server = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=out, env=self._environment())
        self.servers.append(server)
        with Client(f"http://127.0.0.1:{command[command.index('--port') + 1]}") as client:

            def is_ready() -> bool:
                assert server.poll() is None, log.read_text()
                try:
                    client.ready()
                except DvpError:
                    return False
                return True

            until(is_ready, f"{block.name}: the server is ready")

    def _succeed(self, command: list[str], *, prints: bool) -> None:
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment(), capture_output=True, text=True, timeout=WITHIN_S
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        assert done.stdout.strip() or not prints, f"{shlex.join(command)} printed nothing"

    def _adapt(self, text: str) -> str:
        """The text with the reader's own ports."""
        return re.sub("|".join(self.ports), lambda port: self.ports[port[0]], text).strip()

    def _environment(self) -> dict[str, str]:
        urls = {f"DVP_{name}__REDIS_URL": self.broker_url for name in ("QUEUE", "MONITOR")}
        return os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(self.folder), **urls}

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
        assert [server.wait(WITHIN_S) for server in self.servers] == [0] * len(self.servers)


async def make_run(broker_url: str, run_id: str) -> None:
    """Registers the run, as its first trainer or replica does."""
    await (await Broker.connect(broker_url, run_id)).close()


def attempt(words: list[str]) -> list[str]:
    """The command without its effect. docker keeps its options, because it refuses unknown ones even with --help."""
    if Path(words[0]).name.startswith("dvp-"):
        return [*words, "--dry-run"]
    return [*words, "--help"] if words[0] == "docker" else [words[0], "--help"]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, broker_url: str) -> Iterator[Reader]:
    asyncio.run(make_run(broker_url, "qwen3-math"))
    reader = Reader(tmp_path_factory.mktemp("reader"), broker_url)
    yield reader
    reader.close()


@pytest.mark.parametrize("block", FAST, ids=lambda block: block.name)
def test_block(reader: Reader, block: Block) -> None:
    reader.run(block)


@pytest.mark.slow
@pytest.mark.parametrize("block", SLOW, ids=lambda block: block.name)
def test_slow_block(reader: Reader, block: Block) -> None:
    if not block.text.startswith("make "):
        reader.run(block)
        return
    # Options of this run (`make test-slow ARGS=...`) are not for that one.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "ARGS")
    }
    command = shlex.split(f"{block.text} {SHORTER.get(block.text.strip(), '')}")
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_reward_of_the_page_works(reader: Reader) -> None:
    block = next(block for block in BLOCKS if block.marks.get("file") == "my_rewards.py")
    names: dict[str, object] = {}
    exec(block.text, names)
    assert names["brief"]("95", "95", prompt="37+58=", extra={}) == pytest.approx(0.998)  # type: ignore[operator]


@pytest.mark.parametrize(
    "text", ["```\nls\n```\n", "```sh\nls\n```\n", "```bash\nfalse\n```\n", "```python\n1 / 0\n```\n"]
)
def test_block_that_is_not_run_or_fails_fails(reader: Reader, text: str) -> None:
    (block,) = read_blocks(text)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        reader.run(block)
