"""Weight folders on the shared volume: written under a hidden name, renamed into place, verified before loading.

    <root>/weights-000041/            complete, announced
    <root>/.weights-000042.partial/   being written; swept if its writer died

A weight folder is flat: regular files and `dvp-manifest.json`, which lists each with its size and SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from dvp_rl.contract.canary import CANARY_NAME, MAX_CANARY_BYTES, Canary
from dvp_rl.contract.errors import WeightError
from dvp_rl.contract.record import describe
from dvp_rl.contract.weights import INITIAL_SEQ, Manifest, WeightFile
from dvp_rl.transport.failpoints import failpoint

FOLDER_NAME = r"^weights-(\d{6,})$"
MANIFEST_NAME = "dvp-manifest.json"
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
CHAT_TEMPLATE = "chat_template.jinja"
"""Where Transformers looks for a chat template before it looks into tokenizer_config.json."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def folder_name(seq: int) -> str:
    """`weights-000042`: name of a published folder, which `sweep` looks for. A folder is written as
    `.weights-000042.partial` in the same place."""
    return f"weights-{seq:06d}"


def copy_companions(model: Path, folder: Path, chat_template: str | None = None) -> None:
    """Copies what belongs to a model besides its weights, such as config and tokenizer, with the text `chat_template`
    in place of the model's template. Raises OSError (disk full)."""
    for source in model.iterdir():
        other = source.name.startswith(".") or source.name.endswith(WEIGHT_SUFFIXES)
        other |= source.name in (MANIFEST_NAME, CANARY_NAME)
        if source.is_file() and not other:
            shutil.copyfile(source, folder / source.name)
    if chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")


def write_manifest(folder: Path, run_id: str, seq: int, step: int) -> Manifest:
    """Hashes and syncs every file of a finished folder, then writes the manifest. Raises WeightError (disk full)."""
    try:
        files = tuple(_describe_file(path, sync=True) for path in _listing(folder))
        manifest = Manifest(run_id=run_id, seq=seq, step=step, files=files)
        failpoint("manifest.before")
        _write_synced(folder / MANIFEST_NAME, manifest.model_dump_json(indent=1).encode())
        _sync(folder)
    except OSError as error:
        raise WeightError(f"cannot finish weight folder {folder}: {error}") from None
    return manifest


def publish_folder(partial: Path, final: Path) -> None:
    """Renames partial to final and syncs the parent. Raises WeightError."""
    failpoint("publish.before")
    try:
        if final.exists():
            raise WeightError(f"weight folder {final} already exists: a sequence number is used only once")
        partial.rename(final)
        _sync(final.parent)
    except OSError as error:
        raise WeightError(f"cannot publish weight folder {final}: {error}") from None
    failpoint("publish.after")


def verify_folder(folder: Path) -> Manifest:
    """The folder's manifest, after a check of every byte. Raises WeightError naming the file: missing, extra, wrong
    size, wrong checksum, symbolic link, or no manifest."""
    manifest = read_manifest(folder)
    listed = {file.name: file for file in manifest.files}
    try:
        present = {path.name: path for path in _listing(folder)}
        for name in sorted(listed.keys() | present.keys()):
            if name not in present:
                raise WeightError(f"{folder / name}: listed in {MANIFEST_NAME}, but missing")
            if name not in listed:
                raise WeightError(f"{folder / name}: not listed in {MANIFEST_NAME}")
            _compare(present[name], listed[name])
    except OSError as error:
        raise WeightError(f"cannot read weight folder {folder}: {error}") from None
    return manifest


def folder_digest(folder: Path) -> str:
    """What Manifest.digest would be for a plain Hugging Face folder: the digest of an initial version. Subfolders and
    hidden files are ignored; links into a model cache are followed. Raises WeightError."""
    try:
        paths = sorted(p for p in folder.iterdir() if p.is_file() and p.name[0] != "." and p.name != MANIFEST_NAME)
        files = tuple(_describe_file(path) for path in paths)
    except OSError as error:
        raise WeightError(f"cannot read model folder {folder}: {error}") from None
    return Manifest(run_id="initial", seq=INITIAL_SEQ, step=0, files=files).digest


def read_canary(folder: Path) -> Canary | None:
    """The canary of a verified folder; None if it has none. Raises WeightError."""
    path = folder / CANARY_NAME
    try:
        if path.stat().st_size > MAX_CANARY_BYTES:
            raise WeightError(f"{path}: larger than {MAX_CANARY_BYTES} bytes")
        return Canary.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WeightError(f"{path}: {error.strerror or error}") from None
    except ValidationError as error:
        raise WeightError(describe(str(path), error)) from None


def newest_seq(root: Path) -> int:
    """The highest sequence number of the folders under root, finished or not; 0 if there is none. Raises WeightError
    (not readable)."""
    names = (re.fullmatch(r"\.?weights-(\d{6,})(?:\.partial|\.old)?", path.name) for path in _entries(root))
    return max((int(match[1]) for match in names if match), default=0)


def sweep(root: Path, *, keep: Iterable[int], last: int, newest: int) -> list[Path]:
    """Deletes published folders under root, except the `last` newest and the seqs in `keep`, and what an interrupted
    publish or sweep left of other seqs. Call it between publishes only. Returns what it deleted. Raises WeightError
    (not writable).

    `newest`: the caller's own newest seq. Higher ones stay: another process wrote them, and may have replaced this
    one."""
    entries = _entries(root)
    seqs = {int(match[1]): path for path in entries if (match := re.fullmatch(FOLDER_NAME, path.name))}
    kept = set(keep) | set(sorted(seqs, reverse=True)[: max(last, 1)])
    unfinished = [
        path
        for path in entries
        if (match := re.fullmatch(r"\.weights-(\d{6,})\.(partial|old)", path.name))
        and (match[2] == "old" or int(match[1]) not in kept)
        and int(match[1]) < newest
    ]
    doomed = [path for seq, path in sorted(seqs.items()) if seq not in kept and seq < newest]
    # Renamed first: a reader must see a whole folder or none.
    failpoint("retire.before")
    try:
        hidden = [path.rename(root / f".{path.name}.old") for path in doomed]
    except OSError as error:
        raise WeightError(f"cannot delete old weights in {root}: {error}") from None
    failpoint("retire.after")
    for path in unfinished + hidden:
        shutil.rmtree(path, ignore_errors=True)
    return doomed + unfinished


def _entries(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except OSError as error:
        raise WeightError(f"cannot read weight folder {root}: {error}") from None


def _listing(folder: Path) -> list[Path]:
    """Every entry but the manifest, sorted. Raises WeightError for anything but a plain file."""
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST_NAME)
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise WeightError(f"{path}: a weight folder holds plain files only, no links and no folders")
    return paths


def _describe_file(path: Path, *, sync: bool = False) -> WeightFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    try:
        return WeightFile(name=path.name, size=size, sha256=digest)
    except ValidationError as error:
        raise WeightError(describe(str(path), error)) from None


def _compare(path: Path, listed: WeightFile) -> None:
    size = path.stat().st_size
    if size != listed.size:
        raise WeightError(f"{path}: {size} bytes, {MANIFEST_NAME} says {listed.size}")
    if _describe_file(path).sha256 != listed.sha256:
        raise WeightError(f"{path}: SHA-256 differs from {MANIFEST_NAME}, the file is damaged")


def read_manifest(folder: Path) -> Manifest:
    """The manifest, i.e. what the folder should hold. Raises WeightError."""
    path = folder / MANIFEST_NAME
    try:
        if path.is_symlink() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise WeightError(f"{path}: a link, or larger than {MAX_MANIFEST_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise WeightError(f"{path}: no manifest, so the folder is not a finished weight version ({error})") from None
    return parse_manifest(data, str(path))


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The validated manifest. Raises WeightError naming `where`."""
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise WeightError(describe(where, error)) from None
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        raise WeightError(f"{where}: lists a file twice")
    return manifest


def _write_synced(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _sync(folder: Path) -> None:
    """Makes a rename or a new name durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
