"""Weight versions: what a trainer announces, and what a folder must contain to be trusted."""

from __future__ import annotations

import hashlib
import json
import re
from enum import StrEnum
from typing import Annotated, NamedTuple, Self

from pydantic import Field

from .record import Record

RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,254}$"
"""Name of a file in a weight folder: never a path, never hidden."""
INITIAL_SEQ = 0
"""Sequence number of weights that no trainer announced: the folder a replica was started with."""


class WeightVersion(NamedTuple):
    """`run_id:seq:digest`. seq only grows within a run and is not the optimizer step."""

    run_id: str
    seq: int
    digest: str

    def __str__(self) -> str:
        return f"{self.run_id}:{self.seq}:{self.digest}"

    @classmethod
    def parse(cls, text: str) -> Self:
        match = re.fullmatch(r"([^:]+):(\d+):([0-9a-z]+)", text)
        if match is None:
            raise ValueError(f"weight version {text!r}: expected run_id:seq:digest")
        return cls(match[1], int(match[2]), match[3])


class WeightFile(Record):
    name: Annotated[str, Field(pattern=FILE_NAME)]
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(Record):
    """`dvp-manifest.json` inside a weight folder: every other file with its checksum, written last."""

    run_id: Annotated[str, Field(pattern=RUN_ID)]
    seq: Annotated[int, Field(ge=0)]
    step: Annotated[int, Field(ge=0)]
    files: tuple[WeightFile, ...]

    @property
    def digest(self) -> str:
        """16 hex digits over names and checksums: equal weights have equal digests, whatever their seq."""
        listing = json.dumps(sorted((f.name, f.sha256) for f in self.files))
        return hashlib.sha256(listing.encode()).hexdigest()[:16]

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.run_id, self.seq, self.digest)


class WeightRoute(StrEnum):
    """How a replica gets a version."""

    FOLDER = "folder"
    """The replica reads the folder on a volume shared with the trainer, or downloads it from `url`."""
    DISTRIBUTED = "distributed"
    """The trainer sends it over a process group. A replica that cannot receive it falls back to FOLDER."""


class Announcement(Record):
    """One entry of the versions stream: these weights are complete, and replicas should serve them from now on."""

    version: str
    step: Annotated[int, Field(ge=0)]
    """Batches that have changed the weights so far; staleness is a difference of two steps."""
    folder: str
    """Absolute path of the HF folder on the shared volume."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """URL at which dvp-weights serves that folder, for replicas without the shared volume: GET <url>/<file>."""
    min_seq: Annotated[int, Field(ge=0)] = 0
    """Oldest seq that may still take jobs, max_staleness steps back."""
    announced_at: float
    route: WeightRoute = WeightRoute.FOLDER

    @property
    def seq(self) -> int:
        return WeightVersion.parse(self.version).seq
