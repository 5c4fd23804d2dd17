"""Runs in the server's interpreter, by path and without importing dvp_rl: `python server_stub.py MODULE FLAGS`.

Ends with the process that started it, however that ends. Reads JSON from standard input: `flags` and `environment`
variables with the keys, which every user of the machine could read on a command line, and the `packages` it needs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    del sys.path[0]  # this folder: its modules would shadow installed packages of the same name
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    line = sys.stdin.readline()
    if not line:
        os._exit(1)  # the parent died before prctl took effect
    given = json.loads(line)
    refuse_missing(given["packages"], given["section"])
    os.environ.update(given["environment"])
    refuse_websockets()
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:], *given["flags"]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def refuse_missing(packages: list[str], section: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        sys.exit(
            f"{sys.executable} lacks {' and '.join(missing)}: install what is missing there, or set {section}.python "
            f"to an environment that has all of it; `make {section}-cpu` builds one without a GPU"
        )


def refuse_websockets() -> None:
    """Servers check their keys over HTTP only. After this, a request for a WebSocket is treated as plain HTTP."""
    from uvicorn.config import WS_PROTOCOLS

    WS_PROTOCOLS["auto"] = WS_PROTOCOLS["none"]


if __name__ == "__main__":
    main()
