"""Runs in SGLang's interpreter, by path and without importing dvp_rl: `python sglang_launch.py FLAGS`.

Ends with the process that started it, however that ends. Reads further flags (the keys) as a JSON list from standard
input, because every user of the machine can read a command line.
"""

from __future__ import annotations

import ctypes
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
    refuse_websockets()
    sys.argv = ["sglang.launch_server", *sys.argv[1:], *json.loads(line)]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def refuse_websockets() -> None:
    """SGLang checks its keys over HTTP only. After this, a request for its audio WebSocket is treated as plain HTTP."""
    from uvicorn.config import WS_PROTOCOLS

    WS_PROTOCOLS["auto"] = WS_PROTOCOLS["none"]


if __name__ == "__main__":
    main()
