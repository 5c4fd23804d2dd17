"""Downloads of weights, on real sockets, over a network that cuts, stalls and corrupts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import UnavailableError, WeightError
from dvp_rl.contract.weights import Manifest, WeightFile
from dvp_rl.http.api_tokens import ApiTokens, Scope
from dvp_rl.rollout.settings import WeightSettings
from dvp_rl.weights.download import WeightCache
from dvp_rl.weights.folder import MANIFEST_NAME, folder_name, verify_folder
from tests.integration.rollout.publishing import flip_a_bit
from tests.integration.weights.conftest import LARGE, RUN_ID, Publish, fetch, in_use, names, serving
from tests.integration.weights.proxy import Fault, Kind, Proxy
from tests.kit.ports import free_port
from tests.kit.tokens import write_token
from tests.kit.wait import until_async

HEADERS = 16_000
"""More bytes than everything but the large file."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def direct(port: int) -> str:
    return f"http://127.0.0.1:{port}"


async def test_a_whole_folder_arrives(publish: Publish, port: int, cache: Path) -> None:
    announced = publish(1, direct(port))
    folder = await fetch(WeightCache(cache), announced, in_use())
    assert str(verify_folder(folder).version) == announced.version
    assert names(cache) == [".lock", folder_name(1)]


async def test_a_proxy_of_the_environment_is_not_asked(
    publish: Publish, port: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    announced = publish(1, direct(port))
    assert str(verify_folder(await fetch(WeightCache(cache), announced, in_use())).version) == announced.version


async def test_a_cut_download_goes_on_where_it_stopped(publish: Publish, port: int, cache: Path) -> None:
    faults = [Fault(Kind.CUT, 1_000_000), Fault(Kind.CUT, 300_000), Fault(Kind.CUT, 700_000)]
    async with Proxy(port, faults).running() as proxy:
        announced = publish(1, proxy.url)
        folder = await fetch(WeightCache(cache), announced, in_use())
        assert str(verify_folder(folder).version) == announced.version
        assert LARGE <= proxy.passed < LARGE + HEADERS


async def test_a_server_that_falls_silent_is_left_and_asked_again(publish: Publish, port: int, cache: Path) -> None:
    async with Proxy(port, [Fault(Kind.STALL, 1_000_000)]).running() as proxy:
        announced = publish(1, proxy.url)
        folder = await fetch(WeightCache(cache, stall_s=3), announced, in_use())
        assert str(verify_folder(folder).version) == announced.version
        assert LARGE <= proxy.passed < LARGE + HEADERS


async def test_a_file_corrupted_on_the_way_is_fetched_anew(publish: Publish, port: int, cache: Path) -> None:
    async with Proxy(port, [Fault(Kind.FLIP, 1_000_000)]).running() as proxy:
        announced = publish(1, proxy.url)
        folder = await fetch(WeightCache(cache), announced, in_use())
        assert str(verify_folder(folder).version) == announced.version
        assert 2 * LARGE <= proxy.passed < 2 * LARGE + HEADERS


async def test_a_file_that_stays_corrupt_is_refused(publish: Publish, port: int, volume: Path, cache: Path) -> None:
    announced = publish(1, direct(port))
    flip_a_bit(volume / RUN_ID / folder_name(1) / "model.safetensors")
    with pytest.raises(WeightError, match=r"model\.safetensors: SHA-256 differs .* 2 times"):
        await fetch(WeightCache(cache), announced, in_use())
    assert not (cache / folder_name(1)).exists()


async def test_a_download_that_was_given_up_goes_on_in_another_process(
    publish: Publish, port: int, cache: Path
) -> None:
    async with Proxy(port, [Fault(Kind.STALL, 2_000_000)]).running() as proxy:
        announced = publish(1, proxy.url)
        given_up = asyncio.create_task(fetch(WeightCache(cache), announced, in_use()))
        file = cache / f".{folder_name(1)}.partial" / "model.safetensors"
        await until_async(lambda: file.exists() and file.stat().st_size >= 1_000_000)
        await cancel([given_up])
        passed = proxy.passed
        await fetch(WeightCache(cache), announced, in_use())
        assert proxy.passed - passed < LARGE - 1_000_000 + HEADERS


async def test_a_download_that_takes_too_long_is_given_up(publish: Publish, port: int, cache: Path) -> None:
    async with Proxy(port, [Fault(Kind.STALL, 0)]).running() as proxy:
        with pytest.raises(WeightError, match=r"not complete within 0\.5 s"):
            await fetch(WeightCache(cache, timeout_s=0.5), publish(1, proxy.url), in_use())


@pytest.mark.usefixtures("impatient")
async def test_a_server_that_is_gone_is_named(publish: Publish, cache: Path) -> None:
    with pytest.raises(WeightError, match=r"127\.0\.0\.1.*All connection attempts failed"):
        await fetch(WeightCache(cache), publish(1, direct(free_port())), in_use())


async def test_a_version_that_was_swept_is_named(publish: Publish, port: int, cache: Path) -> None:
    announced = publish(1, direct(port)).model_copy(
        update={"url": f"{direct(port)}/v1/weights/{RUN_ID}/weights-000002"}
    )
    with pytest.raises(WeightError, match="HTTP 404; the trainer has deleted this version"):
        await fetch(WeightCache(cache), announced, in_use())


async def test_another_version_than_the_announced_one_is_refused(publish: Publish, port: int, cache: Path) -> None:
    other = publish(2, direct(port)).url
    with pytest.raises(WeightError, match=r"holds run:2:.*, but run:1:.* was announced"):
        await fetch(WeightCache(cache), publish(1, direct(port)).model_copy(update={"url": other}), in_use())


async def test_a_disk_without_room_is_told_before_anything_is_fetched(
    publish: Publish, port: int, volume: Path, cache: Path
) -> None:
    announced = publish(1, direct(port))
    huge = Manifest(run_id=RUN_ID, seq=1, step=1, files=(WeightFile(name="a", size=2**60, sha256="0" * 64),))
    (volume / RUN_ID / folder_name(1) / MANIFEST_NAME).write_text(huge.model_dump_json())
    with pytest.raises(WeightError, match=r"weights\.cache .* MiB to fetch, \d+ MiB free"):
        await fetch(WeightCache(cache), announced.model_copy(update={"version": str(huge.version)}), in_use())


async def test_a_cache_that_cannot_be_written_is_named(publish: Publish, port: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightError, match=r"weights\.cache .*Not a directory"):
        await fetch(WeightCache(tmp_path / "file" / "cache"), publish(1, direct(port)), in_use())


async def test_replicas_of_one_host_download_once(publish: Publish, port: int, cache: Path) -> None:
    async with Proxy(port, []).running() as proxy:
        announced = publish(1, proxy.url)
        folders = await asyncio.gather(*(fetch(WeightCache(cache), announced, in_use()) for _ in range(4)))
        assert set(folders) == {cache / folder_name(1)}
        assert LARGE <= proxy.passed < LARGE + HEADERS


async def test_what_is_here_needs_no_server_unless_it_is_damaged(publish: Publish, port: int, cache: Path) -> None:
    gone = publish(1, direct(port)).model_copy(update={"url": f"{direct(port)}/gone"})
    folder = await fetch(WeightCache(cache), publish(1, direct(port)), in_use())
    assert await fetch(WeightCache(cache), gone, in_use()) == folder
    flip_a_bit(folder / "model.safetensors")
    with pytest.raises(WeightError, match="HTTP 404"):
        await fetch(WeightCache(cache), gone, in_use())
    await fetch(WeightCache(cache), publish(1, direct(port)), in_use())
    assert str(verify_folder(folder).version) == gone.version


async def test_old_versions_go_unless_a_replica_serves_them(publish: Publish, port: int, cache: Path) -> None:
    async def nobody_knows() -> frozenset[int]:
        raise UnavailableError("the broker is away")

    for seq in (1, 2, 3):
        await fetch(WeightCache(cache), publish(seq, direct(port)), nobody_knows)
    assert names(cache) == [".lock", *map(folder_name, (1, 2, 3))]
    await fetch(WeightCache(cache), publish(4, direct(port)), in_use(1))
    assert names(cache) == [".lock", *map(folder_name, (1, 3, 4))]


async def test_a_token_is_asked_for(publish: Publish, volume: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    token, reader = write_token(folder, Scope.WEIGHTS, "replica"), write_token(folder, Scope.READ, "reader")
    async with serving(volume, ApiTokens(folder=folder)) as port:
        announced = publish(1, direct(port))
        for wrong, reason in (("", "401"), ("guess", "401"), (reader, "403")):
            with pytest.raises(WeightError, match=rf"HTTP {reason}; weights\.token"):
                await fetch(WeightCache(cache, token=lambda wrong=wrong: wrong), announced, in_use())
        assert (await fetch(WeightCache(cache, token=lambda: token), announced, in_use())).is_dir()


async def test_a_replica_and_dvp_weights_change_their_token_together(
    publish: Publish, volume: Path, cache: Path, tmp_path: Path
) -> None:
    """Both read the same file, as on Kubernetes; neither is restarted."""
    folder = tmp_path / "tokens"
    old = write_token(folder, Scope.WEIGHTS, "replica")
    tokens, settings = ApiTokens(folder=folder), WeightSettings(token_file=folder / "weights" / "replica")
    replica = WeightCache(cache, token=settings.read_token)
    async with serving(volume, tokens) as port:
        await fetch(replica, publish(1, direct(port)), in_use())
        new = write_token(folder, Scope.WEIGHTS, "replica")
        await until_async(lambda: tokens.find(new.encode()))
        assert tokens.find(old.encode()) is None
        assert (await fetch(replica, publish(2, direct(port)), in_use())).is_dir()


@pytest.mark.parametrize(
    ("data", "reason"),
    [(None, "No such file"), (b"", "holds no token"), (b"short", "at least 16"), (b"\xff" * 20, "printable ASCII")],
)
def test_a_token_file_that_holds_none_is_named(data: bytes | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(WeightError, match=rf"weights\.token_file {file}: .*{reason}"):
        WeightSettings(token_file=file).read_token()
