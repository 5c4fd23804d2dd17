"""Named points where a test can stop this process. Disabled at no cost unless DVP_FAILPOINTS is set.

Each Lua script `<name>` is surrounded by `<name>.before` and `<name>.after`: every state transition of a job, a group,
a weight version or the trainer is one script, so a process can be stopped on either side of it. There are also
`read.replicas.after` and `read.trainer.after` (entries read, nothing done yet), `manifest.before`, `publish.*` and
`retire.*` (weight folders: finished, renamed into place, renamed out of sight), `swap.*` (a replica's weights),
`checkpoint.*` (the trainer's checkpoint, renamed into place) and `send_piece.before` (weights being sent to a replica).
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from dvp_rl.contract.errors import ConfigError, DvpError

VARIABLE = "DVP_FAILPOINTS"
BESIDES_SCRIPTS = (
    *("read.replicas.after", "read.trainer.after", "manifest.before", "publish.before", "publish.after"),
    *("retire.before", "retire.after", "swap.before", "swap.after", "checkpoint.before", "checkpoint.after"),
)
IN_SENDING = ("send_piece.before",)
"""Points in the process that sends weights, which `make chaos` does not run: it has its own test."""


class FailPointError(DvpError):
    """Raised by a fail point with action `raise`."""


class _Trap(NamedTuple):
    nth: int
    action: str


def _raise(name: str) -> None:
    raise FailPointError(f"fail point {name}")


_ACTIONS: dict[str, Callable[[str], None]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
}
_passes: Counter[str] = Counter()


@cache
def _traps() -> dict[str, _Trap]:
    return parse(os.environ.get(VARIABLE, ""))


def parse(text: str) -> dict[str, _Trap]:
    """Traps by point, from comma-separated `name[:n]=kill|stop|raise`. Raises ConfigError."""
    traps: dict[str, _Trap] = {}
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*([a-z0-9_.]+)(?::([1-9]\d*))?=(\w+)\s*", part)
        if match is None or match[3] not in _ACTIONS:
            raise ConfigError(f"{VARIABLE} {part!r}: expected name[:n]={'|'.join(_ACTIONS)}")
        traps[match[1]] = _Trap(int(match[2] or 1), match[3])
    return traps


def failpoint(name: str) -> None:
    """Does nothing unless DVP_FAILPOINTS="name[:n]=kill|stop|raise,..." names this point: then its n-th pass (default
    1) ends in SIGKILL, SIGSTOP or FailPointError."""
    traps = _traps()
    if name not in traps:
        return
    _passes[name] += 1
    if _passes[name] == traps[name].nth:
        _ACTIONS[traps[name].action](name)
