from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from dvp_rl.contract.weights import Announcement, WeightVersion
from dvp_rl.http.api_tokens import ApiTokens
from dvp_rl.http.server import bound, http_server
from dvp_rl.http.settings import MAX_REQUESTS
from dvp_rl.weights.app import create_app
from dvp_rl.weights.download import SeqsInUse, WeightCache
from dvp_rl.weights.folder import folder_name, verify_folder, write_manifest
from dvp_rl.weights.mirror import Mirror
from dvp_rl.weights.settings import UpstreamSection

RUN_ID = "run"
LARGE = 3_000_000
Serve = Callable[..., AbstractAsyncContextManager[int]]
Publish = Callable[..., Announcement]


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """The volume that only the trainer and dvp-weights see."""
    return tmp_path / "volume"


@pytest.fixture
def publish(volume: Path) -> Publish:
    """Writes version `seq` and announces it at the server under `base`."""

    def write(seq: int, base: str) -> Announcement:
        folder = volume / RUN_ID / folder_name(seq)
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            (folder / "empty.txt").touch()
            (folder / "model.safetensors").write_bytes(bytes((i * seq) % 251 for i in range(1000)) * (LARGE // 1000))
            write_manifest(folder, RUN_ID, seq, step=seq)
        return Announcement(
            version=str(verify_folder(folder).version),
            step=seq,
            folder=str(folder),
            url=f"{base}/v1/weights/{RUN_ID}/{folder.name}",
            announced_at=time.time(),
        )

    return write


@asynccontextmanager
async def serving(
    root: Path, tokens: ApiTokens | None = None, upstream: UpstreamSection | None = None, port: int = 0
) -> AsyncIterator[int]:
    """Runs dvp-weights in this event loop, and yields its port."""
    mirror = None if upstream is None else Mirror(root, upstream)
    with bound("127.0.0.1", port) as listener:
        http = http_server(create_app(root, tokens or ApiTokens(), MAX_REQUESTS, mirror), 0, MAX_REQUESTS)
        task = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            http.should_exit = http.force_exit = True
            await task


@pytest.fixture
async def port(volume: Path) -> AsyncIterator[int]:
    async with serving(volume) as number:
        yield number


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def fetch(cache: WeightCache, announced: Announcement, in_use: SeqsInUse) -> Path:
    assert announced.url is not None
    return await cache.fetch(announced.url, WeightVersion.parse(announced.version), in_use)


def in_use(*seqs: int) -> Callable[[], Awaitable[frozenset[int]]]:
    async def answer() -> frozenset[int]:
        return frozenset(seqs)

    return answer
