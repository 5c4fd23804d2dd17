"""The distributed weight route: replicas request the announced version, and the trainer sends it while it trains.

Each transfer has its own process group of trainer and one replica, in its own process (send_process.py). A replica that
joins late therefore requests like all others, and one that dies costs only its own transfer. The processes are forked
by multiprocessing's forkserver, so that torch, which takes seconds to import, is imported once.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import multiprocessing.forkserver
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch

from dvp_rl.contract.errors import ConfigError, DvpError, UnavailableError, WeightError
from dvp_rl.contract.transfer import Piece, TransferAnswer, TransferRequest
from dvp_rl.contract.weights import Announcement
from dvp_rl.weights.folder import read_canary
from dvp_rl.weights.pieces import PIECE_BYTES, pieces
from dvp_rl.weights.transfers import Transfers
from dvp_trainer.config import WeightsSection

from .send_process import SENT, Plan, serve

logger = logging.getLogger(__name__)

RETRY_S = 1.0
START_S = 60.0
"""Longest time for a sending process to start, in seconds."""
SERVING = "a transfer"
"""Name of the tasks that serve requests."""
SIOCGIFADDR = 0x8915
"""Linux ioctl for the IPv4 address of an interface."""


class Sender:
    """Sends weights on request. `announced` returns the version to send. Raises ConfigError if the interface does not
    exist or has no IPv4 address."""

    def __init__(
        self,
        announced: Callable[[], Announcement],
        transfers: Transfers,
        weights: WeightsSection,
        device: str,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._announced, self._transfers = announced, transfers
        self._interface, self._timeout_s = weights.interface, weights.send_timeout_s
        self._device, self._piece_bytes = device, piece_bytes
        self._host = address_of(self._interface)
        self._reading = asyncio.Lock()
        self._pieces: tuple[str, tuple[Piece, ...]] = ("", ())
        """Version requested last, and its pieces."""

    async def run(self) -> None:
        """Serves requests until cancelled. A failure costs a transfer, never the run."""
        with suppress(OSError):  # the first transfer retries
            preload()
        async with asyncio.TaskGroup() as sending:
            while True:
                try:
                    request = await self._transfers.next()
                except DvpError as error:
                    logger.warning("cannot receive requests for weights: %s; retrying", error)
                    await asyncio.sleep(RETRY_S)
                    continue
                if request is not None:
                    sending.create_task(self._serve(request), name=SERVING)

    async def _serve(self, request: TransferRequest) -> None:
        try:
            await self._send(request)
            logger.info("sent %s to %d receivers", request.version, request.receivers)
        except (DvpError, OSError) as error:  # TimeoutError is one
            reason = str(error) or f"it took longer than weights.send_timeout_s = {self._timeout_s:g} s"
            logger.warning("%s was not sent: %s", request.version, reason)
            await self._refuse(request, reason)
        except Exception:  # a task boundary: training continues
            logger.exception("%s was not sent", request.version)

    async def _refuse(self, request: TransferRequest, reason: str) -> None:
        try:
            await self._transfers.answer(request, TransferAnswer(error=reason))
        except DvpError as error:
            logger.warning("cannot tell a replica that its transfer failed: %s", error)

    async def _send(self, request: TransferRequest) -> None:
        announced = self._announced()
        if request.version != announced.version:
            raise WeightError(f"the announced version is {announced.version}")
        parts, plan = await self._read(announced), self._plan(request, announced)
        async with forked(plan) as link:
            async with asyncio.timeout(START_S):
                port = await link.readline()
            if port:
                canary = await asyncio.to_thread(read_canary, Path(announced.folder))
                offer = plan.offer(request.version, int(port), parts, canary)
                await self._transfers.answer(request, TransferAnswer(offer=offer))
            async with asyncio.timeout(self._timeout_s):
                outcome = await link.read()
        if outcome != SENT:
            reason = outcome.decode(errors="replace") or "it did not say why"
            raise UnavailableError(
                f"the sending process ended early, as it does if the replica goes away or refuses the weights: {reason}"
            )

    async def _read(self, announced: Announcement) -> tuple[Piece, ...]:
        """The pieces of a version. Reads every byte once, regardless of the number of requests."""
        async with self._reading:
            if self._pieces[0] != announced.version:
                found = await asyncio.to_thread(pieces, Path(announced.folder), self._piece_bytes)
                self._pieces = (announced.version, found)
            return self._pieces[1]

    def _plan(self, request: TransferRequest, announced: Announcement) -> Plan:
        both = all(torch.device(device).type == "cuda" for device in (request.device, self._device))
        return Plan(
            folder=announced.folder,
            host=self._host,
            interface=self._interface,
            size=1 + request.receivers,
            group=request.id,
            backend="nccl" if both else "gloo",
            device=self._device if both else "cpu",
            piece_bytes=self._piece_bytes,
            timeout_s=self._timeout_s,
        )


def preload() -> None:
    """Starts multiprocessing's forkserver, which imports this module while the trainer works."""
    multiprocessing.set_forkserver_preload([__name__])
    multiprocessing.forkserver.ensure_running()


@asynccontextmanager
async def forked(plan: Plan) -> AsyncIterator[asyncio.StreamReader]:
    """Starts a sending process and yields its output. The process ends with the block."""
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("forkserver").Process(target=serve, args=(plan, theirs), daemon=True)

    def start() -> None:
        with theirs:
            try:
                process.start()
            except EOFError:
                raise UnavailableError("the forkserver has ended; the next transfer starts another") from None

    link, writer = await asyncio.open_connection(sock=ours)
    try:
        async with asyncio.timeout(START_S):
            await asyncio.to_thread(start)
        yield link
    finally:
        writer.close()  # also ends a process that is still starting
        if process.is_alive():
            process.kill()


def address_of(interface: str) -> str:
    """The IPv4 address of the interface. Raises ConfigError if it has none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"weights.interface {interface!r}: {error.strerror}; it needs an IPv4 address; there are {names}"
        ) from None
    return socket.inet_ntoa(found[20:24])
