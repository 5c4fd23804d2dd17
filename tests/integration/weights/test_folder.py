"""A weight folder is accepted only if every byte of it matches its manifest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dvp_rl.contract.canary import CANARY_NAME, MAX_CANARY_BYTES
from dvp_rl.contract.errors import WeightError
from dvp_rl.weights.folder import (
    MANIFEST_NAME,
    copy_companions,
    folder_digest,
    folder_name,
    newest_seq,
    publish_folder,
    read_canary,
    sweep,
    verify_folder,
    write_manifest,
)


def _write(root: Path, seq: int = 1, *, content: bytes = b"weights" * 1000) -> Path:
    partial, final = root / f".{folder_name(seq)}.partial", root / folder_name(seq)
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(content)
    (partial / "config.json").write_text("{}")
    write_manifest(partial, "run", seq, step=seq)
    publish_folder(partial, final)
    return final


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _write(tmp_path)


def test_a_published_folder_verifies(folder: Path) -> None:
    manifest = verify_folder(folder)
    assert [file.name for file in manifest.files] == ["config.json", "model.safetensors"]
    assert (manifest.run_id, manifest.seq, manifest.step) == ("run", 1, 1)
    assert manifest.digest == folder_digest(folder)
    assert not list(folder.parent.glob(".*"))


def test_equal_weights_have_equal_digests(tmp_path: Path) -> None:
    first, second = _write(tmp_path, 1), _write(tmp_path, 2)
    other = _write(tmp_path, 3, content=b"other")
    assert verify_folder(first).digest == verify_folder(second).digest != verify_folder(other).digest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "dvp-canary.json"),
        (b'{"dtype": "float32", "log_min_p": -13, "temperature": 1, "walks": []}', "walks"),
        (b" " * (MAX_CANARY_BYTES + 1), f"larger than {MAX_CANARY_BYTES} bytes"),
    ],
    ids=["no json", "no walks", "large"],
)
def test_a_canary_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    assert read_canary(tmp_path) is None
    (tmp_path / CANARY_NAME).write_bytes(content)
    with pytest.raises(WeightError, match=message):
        read_canary(tmp_path)


def test_companions_of_a_model_are_copied_without_its_canary(folder: Path, tmp_path: Path) -> None:
    (folder / CANARY_NAME).write_text("of older weights")
    copy_companions(folder, tmp_path)
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["config.json"]


def _flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _link(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.rename(folder.parent / "outside")
    path.symlink_to(folder.parent / "outside")


def _edit_manifest(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / MANIFEST_NAME
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return edit


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: listed .* but missing"),
    "extra": (lambda folder: (folder / "extra.bin").write_bytes(b""), "extra.bin: not listed"),
    "flipped": (_flip, "model.safetensors: SHA-256 differs"),
    "short": (_truncate, "model.safetensors: 6999 bytes, .* says 7000"),
    "link": (_link, "model.safetensors: .* no links"),
    "subfolder": (lambda folder: (folder / "sub").mkdir(), "sub: .* no folders"),
    "no manifest": (lambda folder: (folder / MANIFEST_NAME).unlink(), "no manifest"),
    "half a manifest": (lambda folder: (folder / MANIFEST_NAME).write_text("{"), MANIFEST_NAME),
    "outside": (_edit_manifest("config.json", "../config.json"), r"files.0.name.*\.\./config.json"),
    "twice": (_edit_manifest("config.json", "model.safetensors"), "twice"),
    "bad seq": (_edit_manifest('"seq": 1', '"seq": -1'), "seq"),
    "gone": (shutil.rmtree, "no manifest"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_named(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(WeightError, match=message):
        verify_folder(folder)


def test_a_linked_manifest_is_refused(folder: Path) -> None:
    manifest = folder / MANIFEST_NAME
    manifest.rename(folder.parent / "elsewhere.json")
    manifest.symlink_to(folder.parent / "elsewhere.json")
    with pytest.raises(WeightError, match="a link"):
        verify_folder(folder)


def test_a_folder_without_its_last_step_does_not_verify(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightError, match="not a finished weight version"):
        verify_folder(tmp_path)


@pytest.mark.parametrize("name", ["-leading", "white space"])
def test_names_that_no_manifest_may_hold_are_refused_when_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(WeightError, match=name):
        write_manifest(tmp_path, "run", 1, 1)


def test_a_sequence_number_is_published_once(folder: Path) -> None:
    with pytest.raises(WeightError, match="already exists"):
        _write(folder.parent)


def test_unwritable_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="nowhere"):
        write_manifest(tmp_path / "nowhere", "run", 1, 1)
    with pytest.raises(WeightError, match="cannot publish"):
        publish_folder(tmp_path / "nowhere", tmp_path / folder_name(1))


def test_the_digest_of_a_plain_folder_follows_links_and_skips_hidden_files(tmp_path: Path) -> None:
    plain, cached = tmp_path / "plain", tmp_path / "cached"
    for folder in (plain, cached):
        folder.mkdir()
    (plain / "config.json").write_text("{}")
    (cached / "config.json").symlink_to(plain / "config.json")
    (cached / ".gitattributes").write_text("x")
    (cached / "sub").mkdir()
    assert folder_digest(plain) == folder_digest(cached)
    with pytest.raises(WeightError, match="nowhere"):
        folder_digest(tmp_path / "nowhere")


def test_sweep_keeps_the_newest_and_the_needed(tmp_path: Path) -> None:
    folders = {seq: _write(tmp_path, seq) for seq in range(1, 8)}
    leftover = tmp_path / f".{folder_name(9)}.partial"
    leftover.mkdir()
    (tmp_path / "mine").mkdir()
    assert set(sweep(tmp_path, keep=[2], last=3, newest=10)) == {folders[1], folders[3], folders[4], leftover}
    assert {path.name for path in tmp_path.iterdir()} == {folder_name(seq) for seq in (2, 5, 6, 7)} | {"mine"}
    assert sweep(tmp_path, keep=[2], last=3, newest=10) == []
    verify_folder(folders[2])


def test_sweep_leaves_alone_what_a_successor_wrote(tmp_path: Path) -> None:
    old, mine, newer, newest = (_write(tmp_path, seq) for seq in (1, 2, 3, 4))
    being_written = tmp_path / f".{folder_name(5)}.partial"
    being_written.mkdir()
    assert sweep(tmp_path, keep=[], last=1, newest=2) == [old]
    assert all(path.exists() for path in (mine, newer, newest, being_written))


def test_the_newest_seq_counts_unfinished_folders_too(tmp_path: Path) -> None:
    assert newest_seq(tmp_path) == 0
    _write(tmp_path, 3)
    (tmp_path / f".{folder_name(7)}.partial").mkdir()
    (tmp_path / "weights-of-mine").mkdir()
    assert newest_seq(tmp_path) == 7


def test_sweep_finishes_what_a_killed_sweep_began(tmp_path: Path) -> None:
    _write(tmp_path).rename(tmp_path / f".{folder_name(1)}.old")
    sweep(tmp_path, keep=[], last=1, newest=10)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_read_or_changed_is_named(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(WeightError, match="nowhere"):
        newest_seq(nowhere)
    with pytest.raises(WeightError, match="nowhere"):
        sweep(nowhere, keep=[], last=1, newest=2)
    _write(tmp_path, 1)
    in_the_way = tmp_path / f".{folder_name(1)}.old" / "folder"
    in_the_way.mkdir(parents=True)
    _write(tmp_path, 2)
    with pytest.raises(WeightError, match=f"old weights in {tmp_path}"):
        sweep(tmp_path, keep=[], last=1, newest=2)
