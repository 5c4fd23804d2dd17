"""Follows a page of the documentation: runs its code blocks in a folder that looks like a clone.

The words after the language in a fence's first line say how:

    (nothing)        run in the foreground; a failure fails the test
    serve            started in the background for the blocks after it; the test substitutes free ports for 8000 and
                     8080, and a broker that knows the run for redis://127.0.0.1:6379/0
    slow             run by the slow tests
    file=NAME        the block is the contents of that file
    prints           a part of what the block before it prints on a terminal, line by line, whatever its numbers are;
                     "…" stands for any text in a line, or for lines that are left out
    needs=gpu,hub    tried as far as possible: our commands and TOML files with --dry-run, other commands with --help
    needs=docker     likewise; skipped without docker compose; test_compose.py tests the effects of these commands
    needs=demo       run by the slow tests, after a short demo
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from dvp_rl.client import Client
from dvp_rl.contract.errors import DvpError
from tests.kit.ports import free_port
from tests.kit.wait import WITHIN_S, until

from .stack import REPOSITORY, require_compose

BIN = Path(sys.executable).parent
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIAGRAMS = {"mermaid", "text"}
NEEDS = {"gpu", "hub", "docker"}
ON_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ANY_LINES = "(?:.*\\n)*?"
RULE = re.compile(r"([━─])\1+")
NUMBER = re.compile(r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


class Block(NamedTuple):
    language: str
    marks: tuple[str, ...]
    text: str
    line: int
    prints: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"line-{self.line}-{self.language}"

    @property
    def file(self) -> str | None:
        return self._value("file")

    @property
    def needs(self) -> set[str]:
        return set((self._value("needs") or "").split(",")) - {""}

    @property
    def is_slow(self) -> bool:
        return "slow" in self.marks or self.needs == {"demo"}

    def builds_on(self, earlier: Block) -> bool:
        """Whether the block may need what `earlier` makes."""
        if self.needs == {"demo"}:
            return earlier.needs == {"demo"}
        return not self.is_slow and (earlier.file is not None or "serve" in earlier.marks)

    def _value(self, name: str) -> str | None:
        return next((mark.removeprefix(f"{name}=") for mark in self.marks if mark.startswith(f"{name}=")), None)


def read_blocks(markdown: str) -> list[Block]:
    """Every fenced block that is code."""
    blocks: list[Block] = []
    for match in FENCE.finditer(markdown):
        language, *marks = match[1].split() or [""]
        line = markdown.count("\n", 0, match.start()) + 1
        if "prints" in marks:
            blocks[-1] = blocks[-1]._replace(prints=(*blocks[-1].prints, match[2]))
        elif language not in DIAGRAMS:
            blocks.append(Block(language, tuple(marks), match[2], line))
    return blocks


class Reader:
    """Follows a page in its own folder. A block finds the files and running servers that the page made before it."""

    def __init__(self, page: Sequence[Block], folder: Path, environment: dict[str, str]) -> None:
        """`environment`: variables of the commands, beside this process's."""
        self.page, self.folder = page, folder
        self.ports = {"8000": str(free_port()), "8080": str(free_port())}
        self.servers: list[subprocess.Popen[bytes]] = []
        self._done: set[Block] = set()
        ours = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(folder), "TERM": "xterm", "COLUMNS": "100"}
        self._environment = os.environ | ours | environment
        for name in ("deploy", "tests"):
            (folder / name).symlink_to(REPOSITORY / name)
        (folder / ".venv").symlink_to(sys.prefix)

    def run(self, block: Block) -> None:
        """Runs the block, after those that it builds on and that did not run yet."""
        before = self.page[: self.page.index(block)] if block in self.page else ()
        for earlier in before:
            if earlier not in self._done and block.builds_on(earlier):
                self._run(earlier)
        self._run(block)

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
        assert [server.wait(WITHIN_S) for server in self.servers] == [0] * len(self.servers)

    def _run(self, block: Block) -> None:
        self._done.add(block)
        if block.file:
            path = self.folder / block.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text)
        if block.needs == {"demo"} and not (self.folder / "runs/demo").exists():
            self._succeed([sys.executable, "-m", "deploy.demo", "--steps=12"])
        match block.language:
            case "bash" if block.needs - {"demo"}:
                self._try(block)
            case "bash" if "serve" in block.marks:
                self._serve(block)
            case "bash":
                command = ["bash", "-euo", "pipefail", "-c", self._adapt(block.text)]
                said = self._succeed([sys.executable, "-c", ON_A_TERMINAL, *command])
                for part in block.prints:
                    assert occurs(part, said), f"{block.name} did not print\n{part}\nbut\n{said}"
                return
            case "python":
                self._succeed([sys.executable, "-c", self._adapt(block.text)], prints=not block.file)
            case "toml" if block.file:
                self._succeed([str(BIN / "dvp-train"), block.file, "--dry-run"])
            case _:
                pytest.fail(f"{block.name}: nothing here knows how to run this block; mark it, or teach the test")
        assert not block.prints, f"{block.name}: what it prints is not compared"

    def _try(self, block: Block) -> None:
        assert block.needs <= NEEDS, f"{block.name}: unknown need in {block.needs}"
        if "docker" in block.needs:
            require_compose()
        for line in block.text.replace("\\\n", " ").splitlines():
            self._succeed(attempt(shlex.split(self._adapt(line))))

    def _serve(self, block: Block) -> None:
        command = shlex.split(self._adapt(block.text))
        log = self.folder / f"{block.name}.log"
        with log.open("wb") as out:
            server = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=out, env=self._environment)
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

    def _succeed(self, command: list[str], *, prints: bool = True) -> str:
        """What the command printed, as a reader sees it."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        assert done.stdout.strip() or not prints, f"{shlex.join(command)} printed nothing"
        return CONTROL_SEQUENCE.sub("", done.stdout).replace(f"{BIN}/", ".venv/bin/")

    def _adapt(self, text: str) -> str:
        """The text with the reader's own ports."""
        return re.sub("|".join(self.ports), lambda port: self.ports[port[0]], text).strip()


def occurs(part: str, said: str) -> bool:
    """Whether the lines of `part` are among those printed, in one piece but for what "…" stands for. Blank lines do
    not count, nor do white space and what numbers there are."""
    patterns = [ANY_LINES if line == "…" else f"{_pattern(line)}\n" for line in _plain(part)]
    return re.search("^" + "".join(patterns), "".join(f"{line}\n" for line in _plain(said)), re.MULTILINE) is not None


def _pattern(line: str) -> str:
    return ".*".join(map(re.escape, line.split("…")))


def _plain(text: str) -> list[str]:
    """The lines without what differs from run to run, or by how a program was started."""
    lines = (" ".join(line.replace(".venv/bin/", "").split()) for line in text.splitlines())
    return [NUMBER.sub("0", RULE.sub(r"\1", line)) for line in lines if line]


def attempt(words: list[str]) -> list[str]:
    """The command without its effect. docker keeps its options, because it refuses unknown ones even with --help."""
    if Path(words[0]).name.startswith("dvp-"):
        return [*words, "--dry-run"]
    return [*words, "--help"] if words[0] == "docker" else [words[0], "--help"]
