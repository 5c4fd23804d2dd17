"""Real services, started in a tenth of the time: one interpreter imports everything once and forks.

A fresh interpreter needs five seconds of CPU to import torch and transformers, which hundreds of kills cannot afford.
What is forked is a process like any other: its own session, environment, log, and `main` of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
IMPORTS = (
    *("torch", "transformers", "transformers.models.qwen3.modeling_qwen3"),
    *("services.rollout.server", "services.engines.transformers", "services.monitor.cli"),
    *("trainer.loop", "trainer.setup"),
)


class Zygote:
    """`with Zygote(log) as zygote: pid = zygote.fork(...)`. Leaving the block kills whatever still runs."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def fork(self, main: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """The process id of a new process that runs `main` (module:function) with these arguments."""
        pid: int = self._ask({"main": main, "argv": [*argv], "environment": {**environment}, "log": str(log)})
        return pid

    def reap(self) -> dict[int, int]:
        """Exit codes, as subprocess has them, of those that have ended since the last call."""
        return {int(pid): code for pid, code in self._ask({}).items()}

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DVP_")}
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.zygote"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=environment,
            )
        self.reap()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            pass  # closes its standard input, and waits


def serve() -> None:
    """One JSON line in, one out, until the input ends: then every child's session is killed."""
    for name in IMPORTS:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    children: set[int] = set()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if request:
            pid = os.fork()
            if pid == 0:
                _become(**request)
            children.add(pid)
            answer: Any = pid
        else:
            answer = dict(_ended(children))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in children:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _ended(children: set[int]) -> list[tuple[int, int]]:
    statuses = [os.waitpid(pid, os.WNOHANG) for pid in children]
    ended = [(pid, os.waitstatus_to_exitcode(status)) for pid, status in statuses if pid]
    children.difference_update(pid for pid, _ in ended)
    return ended


def _become(main: str, argv: list[str], environment: dict[str, str], log: str) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, file), (2, file)):
        os.dup2(source, descriptor)
        os.close(source) if source > 2 and source != file else None
    os.close(file)
    os.environ.update(environment)
    sys.argv = [main, *argv]
    module, _, function = main.partition(":")
    code = 1
    try:
        getattr(importlib.import_module(module), function)()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
