"""The sender sends weights to a receiver that joins as SGLang does."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import shutil
import socket
from collections.abc import Callable, Coroutine
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from dvp_rl.contract.canary import CANARY_NAME
from dvp_rl.contract.errors import ConfigError, UnavailableError, WeightError
from dvp_rl.contract.transfer import Offer, TransferRequest
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.failpoints import IN_SENDING
from dvp_rl.weights.pieces import pieces, stretches
from dvp_rl.weights.transfers import Transfers
from dvp_trainer.publish.send_process import SENT, Plan, serve
from dvp_trainer.publish.sender import address_of, forked, preload
from tests.kit.models import make_model
from tests.kit.wait import WITHIN_S, until
from tests.unit.trainer.test_canary import canary_of, learner_of

from .sending import make_plan, none_sending, sender, sending_processes, stop_at

PIECES = 1 << 15
FORKSERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def request(version: str, *, device: str = "cpu") -> TransferRequest:
    return TransferRequest(id=uuid4().hex, version=version, receivers=1, device=device)


def receive(offer: Offer) -> list[bytes]:
    """Receives every piece as rank 1."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=WITHIN_S)
    store = TCPStore(offer.host, offer.port, offer.size, is_master=False, timeout=timeout)
    group, _ = _new_process_group_helper(
        offer.size,
        1,
        [],
        Backend(offer.backend),
        PrefixStore(offer.group, store),
        group_name=offer.group,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(offer.size)}
    sizes = {"F32": 4}
    found = []
    for piece in offer.pieces:
        count = sum(sizes[tensor.dtype] * torch.Size(tensor.shape).numel() for tensor in piece.tensors)
        buffer = torch.empty(count, dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=group)
        found.append(buffer.numpy().tobytes())
    dist.destroy_process_group(group)
    return found


async def test_every_byte_arrives_and_has_the_checksum_that_was_announced(
    broker: Broker, model: Path, tmp_path: Path
) -> None:
    """The canary comes with them."""
    folder, canary = shutil.copytree(model, tmp_path / "version"), canary_of(learner_of(model, tmp_path))
    (folder / CANARY_NAME).write_text(canary.model_dump_json())
    async with sender(broker, "run:1:aa", folder, piece_bytes=PIECES):
        offer = await Transfers(broker).ask(request("run:1:aa", device="cuda"), WITHIN_S)
        assert (offer.version, offer.host, offer.size, offer.backend) == ("run:1:aa", "127.0.0.1", 2, "gloo")
        assert offer.canary == canary
        found = await asyncio.to_thread(receive, offer)
        await none_sending()
    assert len(found) > 3
    assert [hashlib.sha256(data).hexdigest() for data in found] == [piece.sha256 for piece in offer.pieces]
    weights = load_file(model / "model.safetensors")
    names = [tensor.name for piece in offer.pieces for tensor in piece.tensors]
    assert sorted(names) == sorted(weights)
    assert b"".join(found) == b"".join(weights[name].numpy().tobytes() for name in names)


async def test_only_what_is_announced_now_is_sent(broker: Broker, model: Path) -> None:
    async with sender(broker, "run:2:bb", model):
        with pytest.raises(WeightError, match=r"does not send run:1:aa: the announced version is run:2:bb"):
            await Transfers(broker).ask(request("run:1:aa"), WITHIN_S)
    assert not sending_processes()


async def test_weights_that_are_not_finite_are_not_offered(broker: Broker, model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    async with sender(broker, "run:1:aa", tmp_path):
        with pytest.raises(WeightError, match=r"model\.norm\.weight holds NaN or infinity"):
            await Transfers(broker).ask(request("run:1:aa"), WITHIN_S)


async def test_a_replica_that_never_joins_is_given_up(broker: Broker, model: Path) -> None:
    async with sender(broker, "run:1:aa", model, send_timeout_s=5):
        await Transfers(broker).ask(request("run:1:aa"), WITHIN_S)
        assert len(sending_processes()) == 1
        await none_sending()


@pytest.mark.parametrize("point", IN_SENDING)
async def test_a_sending_process_that_is_killed_costs_one_transfer(
    broker: Broker, model: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    async with sender(broker, "run:1:aa", model, piece_bytes=PIECES):
        stop_at(monkeypatch, f"{point}:2=kill")
        cut_off = await Transfers(broker).ask(request("run:1:aa"), WITHIN_S)
        with pytest.raises(RuntimeError):
            await asyncio.to_thread(receive, cut_off)
        await none_sending()
        monkeypatch.undo()
        offer = await Transfers(broker).ask(request("run:1:aa"), WITHIN_S)
        found = await asyncio.to_thread(receive, offer)
        await none_sending()
    assert [hashlib.sha256(data).hexdigest() for data in found] == [piece.sha256 for piece in offer.pieces]


@pytest.mark.skipif(dist.is_nccl_available(), reason="NCCL would wait for the receiver")
async def test_the_log_says_why_a_transfer_failed(
    broker: Broker, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sender(broker, "run:1:aa", model, device="cuda"):
        assert (await Transfers(broker).ask(request("run:1:aa", device="cuda"), WITHIN_S)).backend == "nccl"
        await none_sending()
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("run:1:aa was not sent: the sending process ended early")
    assert said.endswith("Distributed package doesn't have NCCL built in")


async def test_without_a_trainer_the_wait_is_bounded_and_leaves_nothing(broker: Broker) -> None:
    with pytest.raises(UnavailableError, match=r"no trainer offered run:1:aa within 0.1 s"):
        await Transfers(broker).ask(request("run:1:aa"), 0.1)
    assert await Transfers(broker).next() is None


def run(trainer: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
    """Runs a trainer in its own process, which has its own forkserver."""
    preload()
    asyncio.run(trainer(*args))


def test_it_listens_on_its_interface_only_and_ends_with_the_trainer(model: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    trainer = FORKSERVER.Process(target=run, args=(send_to_nobody, make_plan(model, piece_bytes=PIECES), theirs))
    trainer.start()
    assert ours.poll(WITHIN_S)
    pid, port = ours.recv()
    sending = psutil.Process(pid)
    sockets = sending.net_connections("inet")
    listening = {connection.laddr for connection in sockets if connection.status == psutil.CONN_LISTEN}
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert port in {address.port for address in listening}
    trainer.kill()
    trainer.join()
    until(lambda: not sending.is_running(), "it has ended")


async def send_to_nobody(plan: Plan, test: Connection) -> None:
    async with forked(plan) as link:
        (process,) = multiprocessing.active_children()
        test.send((process.pid, int(await link.readline())))
        await link.read()


def test_it_ends_when_the_trainer_hangs_up_and_has_read_nothing(model: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = FORKSERVER.Process(target=serve, args=(make_plan(model, piece_bytes=PIECES), theirs))
        process.start()
    ours.settimeout(WITHIN_S)
    assert ours.recv(1, socket.MSG_PEEK)
    ours.close()
    process.join(WITHIN_S)
    assert process.exitcode == 1


def test_the_process_that_forks_dies(model: Path) -> None:
    """The transfer that it forked continues; the next transfer starts another forkserver."""
    trainer = FORKSERVER.Process(target=run, args=(lose_the_forkserver, model))
    trainer.start()
    trainer.join(WITHIN_S)
    assert trainer.exitcode == 0


async def lose_the_forkserver(model: Path) -> None:
    for _ in range(2):
        plan = make_plan(model, piece_bytes=PIECES)
        async with forked(plan) as link:
            (process,) = multiprocessing.active_children()
            port = int(await link.readline())
            parent = psutil.Process(process.pid).parent()
            assert parent is not None
            parent.kill()
            offer = plan.offer("run:1:aa", port, pieces(model, PIECES))
            found = await asyncio.to_thread(receive, offer)
            assert [hashlib.sha256(data).hexdigest() for data in found] == [piece.sha256 for piece in offer.pieces]
            assert await link.read() == SENT


def test_an_interface_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"weights.interface 'dvp7': .*there are .*lo"):
        address_of("dvp7")


def test_pieces_are_whole_tensors_side_by_side_in_one_file(tmp_path: Path) -> None:
    """The model has two files, a tensor larger than a piece, and one that would be misaligned behind another."""
    one = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(100), "c": torch.zeros(8), "d": torch.zeros(8)}
    save_file(one, tmp_path / "1.safetensors")
    save_file({"e": torch.zeros(4)}, tmp_path / "2.safetensors")
    found = stretches(tmp_path, limit=64)
    assert [[tensor.name for tensor in stretch.tensors] for stretch in found] == [["b"], ["c", "d"], ["a"], ["e"]]
    assert [stretch.end - stretch.start for stretch in found] == [400, 64, 3, 16]
    assert pieces(tmp_path, limit=64)[1].sha256 == hashlib.sha256(bytes(64)).hexdigest()
