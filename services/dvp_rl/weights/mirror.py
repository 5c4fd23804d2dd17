"""Copies of what another dvp-weights serves, on this one's own disk: they stay available when that one is gone."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from pathlib import Path

from dvp_rl.contract.errors import UnavailableError, WeightError, WeightGoneError
from dvp_rl.contract.weights import WeightVersion
from dvp_rl.weights.download import WeightCache, published
from dvp_rl.weights.folder import read_manifest

from .settings import UpstreamSection

logger = logging.getLogger(__name__)


class Mirror:
    """Copies a version when it is first requested, and keeps the version before it. If upstream does not answer, the
    local copy is served."""

    def __init__(self, root: Path, upstream: UpstreamSection) -> None:
        self._root = root
        self._upstream = upstream
        # One lock per run. WeightCache has one, too, but a caller that waited for it verifies every byte of the folder.
        self._one_download = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def refresh(self, run_id: str, folder: str) -> None:
        """Copies the folder unless the current version is here. Raises WeightGoneError if neither side has it,
        UnavailableError if it could not be copied."""
        here = await asyncio.to_thread(self._held, run_id, folder)
        try:
            await self._copy(run_id, folder, here)
        except WeightGoneError:
            if here is None:
                raise
        except (UnavailableError, WeightError) as error:
            if here is None:
                logger.warning("%s", error)
                raise UnavailableError(str(error)) from None
            logger.warning("%s; serving the local copy of %s", error, here)

    async def _copy(self, run_id: str, folder: str, here: WeightVersion | None) -> None:
        token, url = self._upstream.read_token, f"{self._upstream.url}/v1/weights/{run_id}/{folder}"
        there = await published(url, token, look=here is not None)
        if there == here:
            return
        async with self._one_download[run_id]:
            if there != await asyncio.to_thread(self._held, run_id, folder):
                cache = WeightCache(self._root / run_id, token=token, setting="folder")
                await cache.fetch(url, there, _nobody)

    def _held(self, run_id: str, folder: str) -> WeightVersion | None:
        try:
            return read_manifest(self._root / run_id / folder).version
        except WeightError:
            return None


async def _nobody() -> frozenset[int]:
    return frozenset()
