"""Sources of rows: a JSONL or parquet file, a folder, a data set of the Hugging Face hub, or a user's function.

Only names of the form `hub:owner/name` are looked up on the hub, so a mistyped path never causes a network request.
Code that comes with a data set is never run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from dvp_rl.contract.errors import ConfigError
from dvp_rl.hooks import call_hook, check_members, is_hook, load_hook

HUB = "hub:"
SAVED_BY_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")


class Records(Protocol):
    """Rows by number. Parquet and `datasets` rows stay in Arrow memory until they are read."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[dict[str, Any]]: ...


def open_records(
    source: str, *, split: str = "train", subset: str | None = None, setting: str = "data.train"
) -> Records:
    """The rows of `source`, the value of `setting`. Raises ConfigError naming it if it is missing, of an unknown
    format, damaged or empty."""
    records = _open(source, split, subset, setting)
    if len(records) == 0:
        raise ConfigError(f"{source}: the data set is empty; it needs at least one row")
    return records


def _open(source: str, split: str, subset: str | None, setting: str) -> Records:
    if source.startswith(HUB):
        return _load_dataset(source, source.removeprefix(HUB), split, subset)
    path = Path(source)
    if not path.exists() and is_hook(source):
        return OwnRecords(setting, source, split, subset)
    if not path.exists():
        raise ConfigError(
            f"{source}: no such file or folder. Allowed: a .jsonl or .parquet file, a folder saved by `datasets`, "
            f"{HUB}owner/name for a data set of the Hugging Face hub, or your own rows as module:function"
        )
    if path.is_dir():
        if any((path / name).exists() for name in SAVED_BY_DATASETS):
            return _load_saved(path, split)
        return _load_dataset(source, str(path), split, subset)
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return ParquetRecords(path)
    raise ConfigError(f"{source}: unknown format {path.suffix or 'without suffix'!r}; allowed are .jsonl and .parquet")


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    records = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    records.append(_parse_line(path, number, line))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    return records


def _parse_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: line {number} is not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}: line {number} is a JSON {type(record).__name__}; each line must be one JSON object")
    return record


class ParquetRecords:
    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{path}: not a readable parquet file ({error})") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        record: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return record

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._table.to_batches(max_chunksize=4096):
            yield from batch.to_pylist()


class OwnRecords:
    """Rows of a user's function (trainer/HOOKS.md), which may fail whenever they are read."""

    def __init__(self, setting: str, name: str, split: str, subset: str | None) -> None:
        self._setting = f"{setting} {name!r}"
        self._rows: Records = call_hook(self._setting, load_hook(setting, name), split=split, subset=subset)
        check_members(self._setting, self._rows, methods=("__len__", "__getitem__"))

    def __len__(self) -> int:
        return call_hook(self._setting, len, self._rows)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        return call_hook(self._setting, self._rows.__getitem__, index)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


def _load_saved(folder: Path, split: str) -> Records:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # noqa: BLE001 - datasets raises many types for a damaged folder
        raise ConfigError(f"{folder}: `datasets` cannot read this folder ({_first_line(error)})") from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(f"{folder}: no split {split!r}; the data set has {sorted(loaded)}")
        loaded = loaded[split]
    records: Records = loaded
    return records


def _load_dataset(source: str, name: str, split: str, subset: str | None) -> Records:
    """Loads a hub data set or a folder of data files. `datasets` obeys HF_HUB_OFFLINE and HF_DATASETS_OFFLINE."""
    import datasets

    try:
        records: Records = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # noqa: BLE001 - datasets raises many types: no such data set, no such split, no network
        raise ConfigError(
            f"{source}: `datasets` cannot load split {split!r} of subset {subset!r} ({_first_line(error)}). "
            "Check the name and the split; without network, download it first and give its folder"
        ) from None
    return records


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.300}"
