"""The tensors of a weight folder, read without a model: names, shapes and dtypes, and whether every number is finite.

SGLang loads the tensors of a folder one by one. It skips missing ones, ignores unknown ones, and crashes on a damaged
file, because its fallback reads the same file again. So a folder is compared with the one being served before SGLang
sees it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from dvp_rl.contract.errors import WeightError
from dvp_rl.contract.transfer import TensorSpec

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""Dtypes that may replace each other. bfloat16 is read as bits, as NumPy does not have it."""
BF16_EXPONENT = np.uint16(0x7F80)
"""Bits of the exponent: all ones in infinity and NaN."""
BLOCK = 1 << 20
TIED = "lm_head.weight"


class Stored(NamedTuple):
    """A tensor in a file: bytes [start, end)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_layout(folder: Path) -> dict[str, Stored]:
    """The tensors of the folder's safetensors files by name; reads headers only. Raises WeightError."""
    try:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightError(f"weight folder {folder}: no *.safetensors file in it")
        return {name: stored for file in files for name, stored in _read_header(file)}
    except OSError as error:
        raise WeightError(f"weight folder {folder}: {error}") from None


def check_layout(folder: Path, served: Mapping[str, Stored], optional: Collection[str]) -> None:
    """Raises WeightError naming file and tensor unless the folder's tensors match those of `served` by name, shape and
    kind of number, and are finite. `optional` tensors may be missing or added. Reads every byte."""
    layout = read_layout(folder)
    check_tensors(f"weight folder {folder}", layout, served, optional)
    for name, stored in layout.items():
        check_finite(name, stored)


def check_tensors(
    where: str, offered: Mapping[str, Stored | TensorSpec], served: Mapping[str, Stored], optional: Collection[str]
) -> None:
    """Checks names, shapes and kinds of numbers as `check_layout` does, but not the numbers. Raises WeightError."""
    if missing := sorted(served.keys() - offered.keys() - set(optional)):
        raise WeightError(f"{where}: {missing[0]} is missing ({len(missing)} in all)")
    if unknown := sorted(offered.keys() - served.keys() - set(optional)):
        raise WeightError(f"{where}: {unknown[0]} is not in the model served ({len(unknown)} in all)")
    for name in offered.keys() & served.keys():
        _check_tensor(f"{where}: {name}", offered[name], served[name])


def optional_tensors(folder: Path) -> frozenset[str]:
    """Tensors that any folder of the same model may hold or omit. Raises WeightError."""
    config = _read_config(folder)
    tied = {TIED} if config.get("tie_word_embeddings") else set()
    return frozenset(tied.union(name for name in read_layout(folder) if predicts_further(name, config)))


def predicts_further(name: str, config: Mapping[str, Any]) -> bool:
    """Whether the tensor belongs to the layers after the last one, which predict more than the next token (multi-token
    prediction). Transformers omits them, so a trainer never publishes them."""
    depth, extra = (config.get(key) or 0 for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    behind = tuple(f"model.layers.{layer}." for layer in range(depth, depth + extra))
    return name.startswith(behind) or any(part.startswith("mtp") for part in name.split("."))


def check_finite(name: str, stored: Stored) -> None:
    """Raises WeightError if the tensor holds NaN or infinity. Reads every byte."""
    if stored.dtype in FLOATS and not _is_finite(stored):
        raise WeightError(f"{stored.file}: {name} holds NaN or infinity")


def _check_tensor(what: str, offered: Stored | TensorSpec, served: Stored) -> None:
    if offered.shape != served.shape:
        raise WeightError(f"{what} has shape {list(offered.shape)}, the model needs {list(served.shape)}")
    if offered.dtype != served.dtype and not (offered.dtype in FLOATS and served.dtype in FLOATS):
        names = {"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"}
        raise WeightError(
            f"{what} is {names.get(offered.dtype, offered.dtype)}, the model needs {served.dtype} or another float type"
        )


def _is_finite(stored: Stored) -> bool:
    if stored.start == stored.end:
        return True
    dtype = np.dtype(FLOATS[stored.dtype]).newbyteorder("<")
    count = (stored.end - stored.start) // dtype.itemsize
    numbers = np.memmap(stored.file, dtype, "r", offset=stored.start, shape=(count,))
    blocks = (numbers[i : i + BLOCK] for i in range(0, count, BLOCK))
    if stored.dtype == "BF16":
        return all(((block & BF16_EXPONENT) != BF16_EXPONENT).all() for block in blocks)
    return all(np.isfinite(block).all() for block in blocks)


def _read_header(file: Path) -> Iterator[tuple[str, Stored]]:
    try:
        with safe_open(file, framework="np"):
            pass  # checks lengths, offsets and types
    except SafetensorError as error:
        raise WeightError(f"{file}: cannot be read as safetensors: {error}") from None
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, Stored(file, entry["dtype"], tuple(entry["shape"]), start, end)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise WeightError(f"{folder / 'config.json'}: {error}") from None
    return config
