"""The processes that train one model together: torchrun starts them, rank 0 leads.

Only the leader talks to the queue. For work that all ranks must do together, it sends the name of a method, which every
rank then runs. A single process runs the same code without orders and collectives.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor

from dvp_rl.contract.errors import ConfigError, UnavailableError

STOP = "stop"


class Order(NamedTuple):
    """Name and argument of a method that every rank runs."""

    name: str
    payload: bytes = b""


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class World:
    """A group of ranks, as seen by one of them; a single process unless opened by `joined`."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @classmethod
    @contextmanager
    def joined(cls, device: str, timeout_s: float) -> Iterator[World]:
        """The world described by torchrun's environment. `timeout_s` is the longest wait for another rank.

        With several ranks, a process that ends well skips Python's own shutdown: a gloo thread that releases its last
        tensor during that shutdown aborts the process (pytorch/pytorch#179291).

        Raises ConfigError if the ranks cannot connect.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            yield cls()
            return
        backend = "gloo"
        if device.startswith("cuda"):
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"WORLD_SIZE is {size}, but the ranks cannot connect: {error}; start them with torchrun"
            ) from error
        world = cls(dist.get_rank(), size)
        try:
            yield world
            world.order(Order(STOP))
        finally:
            dist.destroy_process_group()
        atexit.register(_end)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Runs the block on one rank of each machine at a time, so that peak memory is needed only once."""
        mine, turns = int(os.environ.get("LOCAL_RANK", "0")), self.max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        for turn in range(turns):
            if turn == mine:
                yield
            self.max(0)

    def order(self, order: Order) -> None:
        """Sends an order of the leader to all other ranks; does nothing on those."""
        if self.size > 1 and self.leads:
            payload = torch.frombuffer(bytearray(msgpack.packb(order)), dtype=torch.uint8)
            dist.broadcast(torch.tensor([len(payload)]), src=0)
            dist.broadcast(payload, src=0)

    def orders(self) -> Iterator[Order]:
        """Receives the leader's orders on another rank until STOP. Raises UnavailableError if the leader is gone."""
        while True:
            length = torch.zeros(1, dtype=torch.int64)
            try:
                dist.broadcast(length, src=0)
            except RuntimeError:
                raise UnavailableError(f"rank {self.rank}: rank 0 has ended; its log says why") from None
            payload = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(payload, src=0)
            order = Order(*msgpack.unpackb(payload.numpy().tobytes()))
            if order.name == STOP:
                return
            yield order

    def sum(self, *values: float) -> list[float]:
        """Sums each value over all ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        self._reduce(total, dist.ReduceOp.SUM)
        return total.tolist()

    def max(self, value: int) -> int:
        largest = torch.tensor(value)
        self._reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def _reduce(self, own: Tensor, how: dist.ReduceOp.RedOpType) -> None:
        """Reduces in place. Raises UnavailableError if another rank is gone or does not arrive in time."""
        if self.size == 1:
            return
        try:
            dist.all_reduce(own, how)
        except RuntimeError:
            raise UnavailableError(f"rank {self.rank}: another rank has ended or hangs; its log says why") from None

    def gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, which must have the same dtype and number of dimensions."""
        if self.size == 1:
            return [part]
        shapes = [shape.tolist() for shape in self._gather_alike(torch.tensor(part.shape))]
        padded = part.new_zeros(tuple(max(sizes) for sizes in zip(*shapes, strict=True)))
        padded[_corner(list(part.shape))] = part
        return [whole[_corner(shape)] for whole, shape in zip(self._gather_alike(padded), shapes, strict=True)]

    def _gather_alike(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part)
        return parts


def _corner(shape: list[int]) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)
