"""Weight folders on the shared volume: written beside and renamed into place, verified before they are loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from services.contract.weights import Manifest

MANIFEST_NAME = "dvp-manifest.json"


def folder_name(seq: int) -> str:
    """`weights-000042`: what publish_folder's `final` is called, and what sweep looks for."""
    raise NotImplementedError


def write_manifest(folder: Path, run_id: str, seq: int, step: int) -> Manifest:
    """Hashes and syncs every file of a finished folder; the manifest comes last. Raises WeightError (also: disk full)."""
    raise NotImplementedError


def publish_folder(tmp: Path, final: Path) -> None:
    """Renames tmp to final and syncs the parent. Raises WeightError."""
    raise NotImplementedError


def verify_folder(folder: Path) -> Manifest:
    """Reads every byte. Raises WeightError naming the file: missing, extra, wrong size, wrong checksum, symbolic link, or
    no manifest."""
    raise NotImplementedError


def folder_digest(folder: Path) -> str:
    """What Manifest.digest would be for a plain Hugging Face folder: the digest of an initial version."""
    raise NotImplementedError


def sweep(root: Path, *, keep: Iterable[int], last: int) -> list[Path]:
    """Deletes published folders under root, except the `last` newest and the seqs in `keep`, and leftovers of an
    interrupted publish. Returns what it deleted."""
    raise NotImplementedError
