"""Finds the folder of an announced version: on the shared volume, or downloaded."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dvp_rl.contract.errors import WeightError
from dvp_rl.contract.weights import Announcement, WeightVersion
from dvp_rl.weights.download import SeqsInUse, WeightCache
from dvp_rl.weights.folder import verify_folder

from .settings import RolloutSettings


class WeightFolders:
    def __init__(self, cache: WeightCache, *, shared: bool = True) -> None:
        """`shared`: look for the announced folder before downloading."""
        self._cache = cache
        self._shared = shared

    @classmethod
    def of(cls, settings: RolloutSettings) -> WeightFolders:
        given = settings.weights
        root = given.cache.expanduser().absolute() / settings.run_id
        cache = WeightCache(root, token=given.read_token, timeout_s=given.timeout_s)
        return cls(cache, shared=given.shared)

    async def find(self, announcement: Announcement, in_use: SeqsInUse) -> Path:
        """A folder that is verified to hold the announced version. Raises WeightError."""
        folder = Path(announcement.folder)
        visible = self._shared and await asyncio.to_thread(folder.is_dir)
        if announcement.url is not None and not visible:
            return await self._cache.fetch(announcement.url, WeightVersion.parse(announcement.version), in_use)
        manifest = await asyncio.to_thread(verify_folder, folder)
        if str(manifest.version) != announcement.version:
            raise WeightError(f"{folder}: expected {announcement.version}, found {manifest.version}")
        return folder
