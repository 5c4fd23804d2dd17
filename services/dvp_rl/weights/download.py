"""Weight folders over HTTP, for hosts that do not mount the trainer's volume.

    <root>/.lock                      held by the one process of this host that downloads
    <root>/.weights-000042.partial/   resumed where the connection was cut, also by another process
    <root>/weights-000042/            complete and verified

The announcement holds the digest of the manifest, and the manifest the checksum of every file: neither the server nor
the network is trusted.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import random
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import httpx

from dvp_rl.contract.errors import UnavailableError, WeightError, WeightGoneError
from dvp_rl.contract.weights import Manifest, WeightFile, WeightVersion

from .folder import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    folder_name,
    parse_manifest,
    publish_folder,
    sweep,
    verify_folder,
)

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
STALL_S = 30.0
TRIES = 5
"""Consecutive attempts that transfer no bytes before the download fails."""
MAX_DAMAGED = 2
"""Arrivals of one file with a wrong checksum that make the download fail."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
LOOK_S = 0.1
KEEP_LAST = 1
"""Versions kept besides those in use and the one being downloaded."""
BLOCK_BYTES = 1024 * 1024
MAX_DETAIL_BYTES = 4096

SeqsInUse = Callable[[], Awaitable[frozenset[int]]]
Token = Callable[[], str]
"""Returns the token to send; called for each download. Raises WeightError."""


class _CutError(Exception):
    """The transfer ended early; a retry may help."""


class WeightCache:
    """Weight folders of one run on this host's own disk; the replicas of one host may share them."""

    def __init__(
        self,
        root: Path,
        *,
        token: Token = str,
        timeout_s: float = 3600.0,
        stall_s: float = STALL_S,
        setting: str = "weights.cache",
    ) -> None:
        """`timeout_s`: longest time for one version. `stall_s`: longest silence of the server. `setting`: name of the
        setting that holds `root`, for error messages."""
        self._root = root
        self._timeout_s = timeout_s
        self._token = token
        self._stall_s = stall_s
        self._setting = setting

    async def fetch(self, url: str, version: WeightVersion, in_use: SeqsInUse) -> Path:
        """The verified folder of the version, downloaded from `url` if it is not here. Older versions are deleted
        before a download, except those `in_use`. Raises WeightError: gone, refused, damaged, too slow, disk full, no
        token. The next attempt resumes from what has arrived."""
        final = self._root / folder_name(version.seq)
        try:
            async with asyncio.timeout(self._timeout_s), self._alone():
                if not await asyncio.to_thread(_holds, final, version):
                    await self._sweep(version.seq, in_use)
                    await self._download(url, version, final)
        except TimeoutError:
            raise WeightError(f"{url}: not complete within {self._timeout_s:g} s; the next attempt resumes") from None
        except UnavailableError as error:
            raise WeightError(str(error)) from None
        except OSError as error:
            raise WeightError(f"{self._setting} {self._root}: {error}; make room or name another folder") from None
        return final

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Holds the lock for one process at a time; the kernel releases the lock of a process that dies."""
        self._root.mkdir(parents=True, exist_ok=True)
        with await asyncio.to_thread((self._root / ".lock").open, "w") as lock:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                await asyncio.sleep(LOOK_S)
            yield

    async def _sweep(self, seq: int, in_use: SeqsInUse) -> None:
        # If it is unknown which versions are in use, nothing is deleted.
        with suppress(UnavailableError):
            keep = await in_use() | {seq}
            await asyncio.to_thread(sweep, self._root, keep=keep, last=KEEP_LAST, newest=seq)

    async def _download(self, url: str, version: WeightVersion, final: Path) -> None:
        start = time.monotonic()
        partial = final.with_name(f".{final.name}.partial")
        partial.mkdir(exist_ok=True)
        async with _client(self._token, self._stall_s) as client:
            data, manifest = await _read_manifest(client, url, TRIES)
            _compare(url, manifest.version, version)
            missing = await asyncio.to_thread(self._prepare, partial, manifest)
            for file in manifest.files:
                await _fetch_file(client, f"{url}/{file.name}", partial / file.name, file)
        await asyncio.to_thread(_finish, partial, final, data)
        logger.info("fetched %s: %d MiB in %.1f s", version, missing >> 20, time.monotonic() - start)

    def _prepare(self, partial: Path, manifest: Manifest) -> int:
        """Creates every missing file, keeps the beginnings left by an earlier attempt, and returns how many bytes are
        still to come. Raises WeightError if the disk has no room."""
        sizes = {file.name: file.size for file in manifest.files}
        for path in partial.iterdir():
            if path.stat().st_size > sizes.get(path.name, -1):
                path.unlink()
        for name in sizes:
            (partial / name).touch()
        missing = sum(size - _size(partial / name) for name, size in sizes.items())
        free = shutil.disk_usage(partial).free
        if missing > free:
            raise WeightError(
                f"{self._setting} {self._root}: {missing >> 20} MiB to fetch, {free >> 20} MiB free; "
                "make room or name another folder"
            )
        return missing


async def published(url: str, token: Token, *, look: bool = False) -> WeightVersion:
    """The version in the folder at `url`. `look`: asks once, with a timeout of a few seconds. Raises UnavailableError
    if the server does not answer, WeightGoneError, WeightError."""
    async with _client(token, CONNECT_TIMEOUT_S if look else STALL_S) as client:
        _, manifest = await _read_manifest(client, url, 1 if look else TRIES)
    return manifest.version


async def await_published(url: str, version: WeightVersion, token: Token, timeout_s: float) -> None:
    """Waits until the folder at `url` holds this version. Raises WeightError: refused, gone, another version, or no
    answer within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _compare(url, await published(url, token), version)
        except UnavailableError as error:
            if time.monotonic() > deadline:
                raise WeightError(f"{error}; waited {timeout_s:g} s") from None
            logger.warning("version %d is not announced yet: %s", version.seq, error)


def _holds(folder: Path, version: WeightVersion) -> bool:
    try:
        return verify_folder(folder).version == version
    except WeightError:
        return False


def _compare(url: str, held: WeightVersion, version: WeightVersion) -> None:
    if held != version:
        raise WeightError(f"{url} holds {held}, but {version} was announced")


def _finish(partial: Path, final: Path, manifest: bytes) -> None:
    (partial / MANIFEST_NAME).write_bytes(manifest)
    if final.exists():
        # Damaged, or left by an earlier run of the same name. Renamed first, so that nobody sees half a folder.
        shutil.rmtree(final.rename(final.with_name(f".{final.name}.old")))
    publish_folder(partial, final)


async def _fetch_file(client: httpx.AsyncClient, url: str, path: Path, file: WeightFile) -> None:
    """Downloads one file, resuming where an earlier attempt ended. Raises WeightError."""
    stuck = damaged = 0
    while True:
        before = _size(path)
        if before == file.size:
            if await asyncio.to_thread(_keep_if, path, file.sha256):
                return
            damaged += 1
            logger.warning("%s: SHA-256 differs from %s, fetching it again", url, MANIFEST_NAME)
            if damaged == MAX_DAMAGED:
                raise WeightError(f"{url}: SHA-256 differs from {MANIFEST_NAME}, {damaged} times in a row")
            continue
        try:
            await _append(client, url, path, file.size)
        except _CutError as cut:
            stuck = 0 if _size(path) > before else stuck + 1
            if stuck == TRIES:
                raise WeightError(f"{url}: {cut}; {_size(path)} of {file.size} bytes have arrived") from None
            logger.warning("%s: %s at byte %d of %d, resuming", url, cut, _size(path), file.size)
            await asyncio.sleep(_pause(stuck))


async def _append(client: httpx.AsyncClient, url: str, path: Path, size: int) -> None:
    """Appends the missing bytes of a file of `size` bytes, or rewrites it if the server sends all of it. Raises
    _CutError, WeightError."""
    have = _size(path)
    async with _get(client, url, {"Range": f"bytes={have}-"} if have else {}) as response:
        going_on = response.status_code == 206
        if going_on and not response.headers.get("content-range", "").startswith(f"bytes {have}-"):
            raise WeightError(f"{url}: requested from byte {have}, got {response.headers.get('content-range')!r:.80}")
        with await asyncio.to_thread(path.open, "ab" if going_on else "wb") as out:
            await _write(response, out, url, size - have if going_on else size)
    if _size(path) < size:
        raise _CutError("the response ended early")


async def _write(response: httpx.Response, out: BinaryIO, url: str, room: int) -> None:
    """Writes everything that arrives, even if the response ends early. Full blocks are written on a thread: a disk may
    be slow, and this event loop has jobs to serve."""
    block = bytearray()
    try:
        async for chunk in response.aiter_raw():
            room -= len(chunk)
            if room < 0:
                raise WeightError(f"{url}: longer than {MANIFEST_NAME} says")
            block += chunk
            if len(block) >= BLOCK_BYTES:
                full, block = block, bytearray()
                await asyncio.to_thread(out.write, full)
    finally:
        out.write(block)


def _client(token: Token, stall_s: float) -> httpx.AsyncClient:
    # A client with its own transport ignores proxies of the environment: replicas and trainer are one installation.
    direct = httpx.AsyncHTTPTransport()
    shown = token()
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {shown}"} if shown else {})
    waits = httpx.Timeout(stall_s, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(headers=headers, timeout=waits, transport=direct)


async def _read_manifest(client: httpx.AsyncClient, url: str, tries: int) -> tuple[bytes, Manifest]:
    """The manifest, as bytes and parsed. Raises UnavailableError after `tries` failed attempts, WeightError."""
    where = f"{url}/{MANIFEST_NAME}"
    for attempt in range(1, tries + 1):
        data = b""
        try:
            async with _get(client, where, {}) as response:
                async for chunk in response.aiter_raw():
                    data += chunk
                    if len(data) > MAX_MANIFEST_BYTES:
                        raise WeightError(f"{where}: larger than {MAX_MANIFEST_BYTES} bytes")
            return data, parse_manifest(data, where)
        except _CutError as cut:
            if attempt == tries:
                raise UnavailableError(f"{where}: {cut}") from None
            await asyncio.sleep(_pause(attempt))
    raise AssertionError("unreachable")


@asynccontextmanager
async def _get(client: httpx.AsyncClient, url: str, headers: dict[str, str]) -> AsyncIterator[httpx.Response]:
    """A successful response. Raises _CutError if a retry may help, also while it is read; otherwise WeightError."""
    try:
        async with client.stream("GET", url, headers=headers) as response:
            if response.status_code not in (200, 206):
                raise _refusal(url, response.status_code, await _detail(response))
            yield response
    except httpx.TransportError as error:
        raise _CutError(str(error) or type(error).__name__) from None
    except httpx.InvalidURL as error:
        raise WeightError(f"{url}: {error}") from None


def _refusal(url: str, status: int, detail: str) -> Exception:
    if status == 429 or status >= 500:
        return _CutError(f"HTTP {status}: {detail}" if detail else f"HTTP {status}")
    token = "weights.token (a mirror's: upstream.token)"
    remedies = {
        401: f"{token} must be a token of dvp-weights",
        403: f"{token} needs scope weights; without tokens dvp-weights answers on loopback only",
        404: "the trainer has deleted this version, or dvp-weights serves another folder than the trainer writes",
    }
    remedy = remedies.get(status, "weights.url of the trainer must name dvp-weights")
    return (WeightGoneError if status == 404 else WeightError)(f"{url}: HTTP {status}; {remedy}")


async def _detail(response: httpx.Response) -> str:
    """The detail of a problem document, as one printable line; "" for anything else."""
    data = b""
    async for chunk in response.aiter_raw():
        data += chunk
        if len(data) > MAX_DETAIL_BYTES:
            return ""
    try:
        return "".join(filter(str.isprintable, json.loads(data)["detail"]))
    except (ValueError, KeyError, TypeError):
        return ""


def _pause(failures: int) -> float:
    longest: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**failures)
    return longest * random.uniform(0.5, 1.0)


def _size(path: Path) -> int:
    return path.stat().st_size


def _keep_if(path: Path, sha256: str) -> bool:
    """True if the file has this checksum; otherwise empties it."""
    with path.open("rb") as file:
        matches = hashlib.file_digest(file, "sha256").hexdigest() == sha256
    if not matches:
        path.write_bytes(b"")
    return matches
