"""The process that sends one weight version to one replica: rank 0 of a process group that ends with it.

It is a separate process because a broadcast to a receiver that died can only be ended by killing the sender.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup, broadcast
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from dvp_rl.contract.canary import Canary
from dvp_rl.contract.transfer import Offer, Piece
from dvp_rl.transport.failpoints import failpoint
from dvp_rl.weights.pieces import stretches

SENT = b"sent"


@dataclass(frozen=True)
class Plan:
    folder: str
    host: str
    interface: str
    size: int
    group: str
    backend: Literal["gloo", "nccl"]
    device: str
    piece_bytes: int
    timeout_s: float

    def offer(self, version: str, port: int, parts: tuple[Piece, ...], canary: Canary | None = None) -> Offer:
        return Offer(
            version=version,
            host=self.host,
            port=port,
            size=self.size,
            group=self.group,
            backend=self.backend,
            pieces=parts,
            canary=canary,
        )


def serve(plan: Plan, link: socket.socket) -> None:
    """Sends the weights. Writes its port as a line to `link`, and SENT when done, or why it failed. Ends when the other
    side hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(link,), daemon=True).start()
    for library in ("GLOO", "NCCL"):
        os.environ[f"{library}_SOCKET_IFNAME"] = plan.interface
    # TCPStore itself would listen on every interface, so it gets a socket that listens on one.
    with socket.create_server((plan.host, 0)) as listener:
        port: int = listener.getsockname()[1]
        store = TCPStore(
            plan.host,
            port,
            plan.size,
            is_master=True,
            timeout=timedelta(seconds=plan.timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    link.sendall(b"%d\n" % port)
    try:
        send(plan, join(plan, store))
    except RuntimeError as error:  # raised by torch if a member went away, or if NCCL cannot join the two
        reason, _, _ = str(error).partition("Exception raised from")  # a stack of C++ frames
        link.sendall(" ".join(reason.split()).encode())
        os._exit(1)
    link.sendall(SENT)
    os._exit(0)  # destroying the group would wait for its members


def _end_with(link: socket.socket) -> None:
    with suppress(OSError):  # reset by the peer, if it closed without reading everything
        link.recv(1)
    os._exit(1)


def join(plan: Plan, store: TCPStore) -> ProcessGroup:
    """The counterpart of SGLang's init_custom_process_group; torch has no public API to join such a group."""
    group, _ = _new_process_group_helper(
        plan.size,
        0,
        [],
        Backend(plan.backend),
        PrefixStore(plan.group, store),
        group_name=plan.group,  # type: ignore[arg-type]
        timeout=timedelta(seconds=plan.timeout_s),
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(plan.size)}
    assert isinstance(group, ProcessGroup), "this process is a member"
    return group


def send(plan: Plan, group: ProcessGroup) -> None:
    device = torch.device(plan.device)
    for file, start, end, _ in stretches(Path(plan.folder), plan.piece_bytes):
        failpoint("send_piece.before")
        mapped = torch.from_file(str(file), shared=False, size=end, dtype=torch.uint8)
        broadcast(mapped[start:].to(device), src=0, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
