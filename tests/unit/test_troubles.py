"""The faults that chaos tests inject have the stated effects, and the witness reports what it should."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dvp_rl.ports import HOST
from tests.chaos.troubles import Disk, denied, half_open, no_files
from tests.chaos.witness import CONTEXT_LINES, MOST_MIB, Memory, living, peak_mib, tracebacks
from tests.kit.processes import PYTHON, ROOT, process

OBEDIENT = """
import sys
from tests.chaos.troubles import obey_modes
obey_modes()
for path in sys.stdin:
    try:
        open(path.strip()).close()
    except OSError as error:
        print(error.errno, flush=True)
    else:
        print(0, flush=True)
"""
"""A process that obeys file modes, opens each file named on stdin, and prints the error number or 0."""


def test_a_process_is_refused_what_the_trouble_takes_away(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    command = [sys.executable, "-c", OBEDIENT]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout

        def outcome() -> int:
            print(file, file=process.stdin, flush=True)
            return int(process.stdout.readline())

        assert outcome() == 0
        with no_files(process.pid):
            assert outcome() == errno.EMFILE
        assert outcome() == 0
        with denied(tmp_path):
            assert outcome() == errno.EACCES
        assert outcome() == 0
        assert 1 < peak_mib(process.pid) < 1000
    assert peak_mib(process.pid) == 0.0


def test_a_disk_is_full_for_a_while_and_keeps_what_is_on_it(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with Disk(folder, mib=1) as disk:
        (folder / "kept").write_text("text")
        if not disk.fillable:
            pytest.skip("NOT TESTED: only root can mount a file system")
        with disk.full(), pytest.raises(OSError, match="No space left"):
            (folder / "more").write_text("text")
        (folder / "more").write_text("text")
        assert os.path.ismount(folder)
    assert not os.path.ismount(folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"kept": "text", "more": "text"}


def test_requests_stay_half_open() -> None:
    with socket.create_server((HOST, 0), backlog=3) as server:
        with half_open(server.getsockname()[1], 3):
            peers = [server.accept()[0] for _ in range(3)]
            assert all(peer.recv(1000).startswith(b"POST ") for peer in peers)
        assert all(peer.recv(1000) == b"" for peer in peers)
        for peer in peers:
            peer.close()


def test_the_witness_reports_each_log_with_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "calm.log").write_text("a line\n")
    log = tmp_path / "replica" / "1.log"
    log.parent.mkdir()
    log.write_text("before\nTraceback (most recent call last)\n  File\nOSError\n" * 2 + "later\n" * CONTEXT_LINES)
    (found,) = tracebacks(tmp_path)
    assert found.startswith(f"2 tracebacks in {log}:")
    assert "before" in found


def test_a_warning_that_pytorch_logs_with_a_traceback_is_no_fault(tmp_path: Path) -> None:
    where = "W1126 04:02:15.802000 25008 .venv/lib/python3.11/site-packages/torch/autograd/profiler.py:858]"
    lines = [
        f"{where} Unexpected error importing a module",
        f"{where} Traceback (most recent call last):",
        f"{where} OSError",
    ]
    (tmp_path / "trainer.log").write_text("\n".join(lines))
    assert tracebacks(tmp_path) == []


def test_the_witness_reports_a_role_that_took_too_much_memory() -> None:
    (found,) = Memory({"replica": MOST_MIB["replica"], "broker": MOST_MIB["broker"] + 1.0}).faults
    assert found.startswith("broker: ")


def test_the_witness_finds_a_process_that_is_left_by_its_environment(tmp_path: Path) -> None:
    command = [*PYTHON, "http.server", "--bind", HOST, "0"]
    with process(command, tmp_path / "log", EVIDENCE=str(tmp_path / "evidence")) as child:
        (found,) = living(tmp_path)
        assert found.startswith(f"process {child.pid} is left: ")
        assert living(tmp_path / "other") == []
    assert living(tmp_path) == []
