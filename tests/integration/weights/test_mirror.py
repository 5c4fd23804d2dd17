"""A mirror copies the versions of another dvp-weights, and still serves them when that one is gone."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import WeightError
from dvp_rl.contract.weights import Announcement, WeightVersion
from dvp_rl.http.api_tokens import ApiTokens, Scope
from dvp_rl.weights.download import WeightCache, await_published
from dvp_rl.weights.folder import MANIFEST_NAME, folder_name, verify_folder, write_manifest
from dvp_rl.weights.settings import UpstreamSection
from tests.integration.weights.conftest import LARGE, RUN_ID, Publish, fetch, in_use, names, serving
from tests.integration.weights.proxy import Fault, Kind, Proxy
from tests.kit.ports import free_port
from tests.kit.tokens import write_token
from tests.kit.wait import until_async

HEADERS = 32_000
"""More bytes than everything but the large file."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The mirror's own disk."""
    return tmp_path / "store"


@asynccontextmanager
async def mirror(store: Path, upstream: str) -> AsyncIterator[str]:
    async with serving(store, upstream=UpstreamSection(url=upstream)) as port:
        yield url(port)


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


async def fetched(tmp_path: Path, announced: Announcement) -> bool:
    """True if a replica with an empty cache gets what was announced."""
    cache = tmp_path / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    folder = await fetch(WeightCache(cache), announced, in_use())
    return str(verify_folder(folder).version) == announced.version


async def test_versions_outlive_where_they_came_from(
    publish: Publish, volume: Path, store: Path, tmp_path: Path
) -> None:
    async with serving(volume) as port, mirror(store, url(port)) as at:
        announced = publish(1, at)
        assert await fetched(tmp_path, announced)
    async with mirror(store, url(free_port())) as at:
        assert await fetched(tmp_path, publish(1, at)), "the mirror was restarted, and upstream is gone"
    shutil.rmtree(volume / RUN_ID)
    async with serving(volume) as port, mirror(store, url(port)) as at:
        assert await fetched(tmp_path, announced.model_copy(update={"url": f"{at}/v1/weights/{RUN_ID}/weights-000001"}))


async def test_many_who_ask_at_once_cost_one_download(publish: Publish, port: int, store: Path, tmp_path: Path) -> None:
    async with Proxy(port, []).running() as proxy, mirror(store, proxy.url) as at:
        announced = publish(1, at)
        caches = [WeightCache(tmp_path / name) for name in "abcd"]
        await asyncio.gather(*(fetch(cache, announced, in_use()) for cache in caches))
        assert LARGE <= proxy.passed < LARGE + HEADERS


async def test_a_cut_is_gone_on_from(publish: Publish, port: int, store: Path, tmp_path: Path) -> None:
    faults = [Fault(Kind.CUT, LARGE), Fault(Kind.CUT, LARGE), Fault(Kind.CUT, LARGE // 2)]
    async with Proxy(port, faults).running() as proxy, mirror(store, proxy.url) as at:
        assert await fetched(tmp_path, publish(1, at))
        assert LARGE <= proxy.passed < LARGE + HEADERS


async def test_a_seq_that_is_used_again_is_copied_again(
    publish: Publish, volume: Path, port: int, store: Path, tmp_path: Path
) -> None:
    """This happens if the trainer's volume was lost and its run started over."""
    async with mirror(store, url(port)) as at:
        announced = publish(1, at)
        assert await fetched(tmp_path, announced)
        folder = volume / RUN_ID / folder_name(1)
        (folder / MANIFEST_NAME).unlink()
        (folder / "config.json").write_text('{"other": 1}')
        version = write_manifest(folder, RUN_ID, 1, step=1).version
        assert str(version) != announced.version
        assert await fetched(tmp_path, announced.model_copy(update={"version": str(version)}))


async def test_one_version_before_the_newest_stays(publish: Publish, port: int, store: Path, tmp_path: Path) -> None:
    async with mirror(store, url(port)) as at:
        for seq in (1, 2, 3, 4):
            assert await fetched(tmp_path, publish(seq, at))
        assert names(store / RUN_ID) == [".lock", *map(folder_name, (3, 4))]
        assert await fetched(tmp_path, publish(1, at)), "upstream still has it"


async def test_what_nobody_has_is_not_there(port: int, store: Path, tmp_path: Path) -> None:
    async with mirror(store, url(port)) as at, httpx.AsyncClient(base_url=f"{at}/v1/weights") as client:
        for folder in (f"{RUN_ID}/{folder_name(7)}", f"other/{folder_name(1)}"):
            assert (await client.get(f"{folder}/{MANIFEST_NAME}")).status_code == 404
    assert names(tmp_path) == [], "requests for missing versions leave nothing behind"


@pytest.mark.usefixtures("impatient")
async def test_what_cannot_be_copied_says_why(publish: Publish, volume: Path, store: Path, tmp_path: Path) -> None:
    away = url(free_port())
    async with mirror(store, away) as at:
        with pytest.raises(WeightError, match=rf"HTTP 503: {away}/v1/weights/.*All connection attempts failed"):
            await fetched(tmp_path, publish(1, at))
    tokens = tmp_path / "tokens"
    write_token(tokens, Scope.WEIGHTS, "replica")
    async with serving(volume, ApiTokens(folder=tokens)) as port, mirror(store, url(port)) as at:
        with pytest.raises(WeightError, match=r"HTTP 503: .*HTTP 401; .*upstream\.token"):
            await fetched(tmp_path, publish(1, at))
    store.touch()  # noqa: ASYNC240
    async with serving(volume) as port, mirror(store, url(port)) as at:
        with pytest.raises(WeightError, match=r"HTTP 503: folder .*: .*Not a directory"):
            await fetched(tmp_path, publish(1, at))


async def test_upstream_is_shown_a_token(publish: Publish, volume: Path, store: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    write_token(tokens, Scope.WEIGHTS, "replica")
    async with serving(volume, ApiTokens(folder=tokens)) as port:
        upstream = UpstreamSection(url=url(port), token_file=tokens / "weights" / "replica")
        async with serving(store, upstream=upstream) as own:
            assert await fetched(tmp_path, publish(1, url(own)))


async def test_a_trainer_waits_until_its_version_is_there(
    publish: Publish, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    announced = publish(1, url(port))
    waiting = asyncio.create_task(await_published(*awaited(announced), 60))
    try:
        await until_async(lambda: "version 1 is not announced yet" in caplog.text)
        assert not waiting.done()
        async with serving(volume, port=port):
            await waiting
    finally:
        await cancel([waiting])


@pytest.mark.usefixtures("impatient")
async def test_a_trainer_does_not_announce_what_is_not_there(
    publish: Publish, port: int, volume: Path, tmp_path: Path
) -> None:
    announced = publish(1, url(port))
    where, version, _ = awaited(announced)
    with pytest.raises(WeightError, match=r"All connection attempts failed; waited 0 s"):
        await await_published(*awaited(publish(1, url(free_port()))), 0)
    with pytest.raises(WeightError, match=r"holds run:1:.*, but run:1:0 was announced"):
        await await_published(where, version._replace(digest="0"), str, 60)
    with pytest.raises(
        WeightError, match="HTTP 404; the trainer has deleted this version, or dvp-weights serves another"
    ):
        await await_published(where.replace("000001", "000002"), version, str, 60)
    write_token(tmp_path / "tokens", Scope.WEIGHTS, "replica")
    async with serving(volume, ApiTokens(folder=tmp_path / "tokens")) as closed:
        with pytest.raises(WeightError, match="HTTP 401"):
            await await_published(*awaited(publish(1, url(closed))), 60)


def awaited(announced: Announcement) -> tuple[str, WeightVersion, type[str]]:
    assert announced.url is not None
    return announced.url, WeightVersion.parse(announced.version), str
