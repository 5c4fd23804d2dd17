"""Model, optimizer and random generator on disk: a folder in PyTorch's distributed checkpoint format.

Every rank writes what it holds, and any number of ranks can read it. The index is a pickle: `Reader` unpickles only the
few classes that an index of tensors contains. PyTorch reads the tensors themselves with weights_only.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.serialization import _get_layout
from transformers import PreTrainedModel

from dvp_rl.contract.errors import ConfigError

from .lora import lora_scaling

TRAINED = StateDictOptions(ignore_frozen_params=True)
_IN_AN_INDEX: tuple[Any, ...] = (
    *(Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata, ChunkStorageMetadata),
    *(_StorageInfo, _MEM_FORMAT_ENCODING, torch.Size, PosixPath, _get_layout),
)
IN_AN_INDEX = {known.__name__: known for known in _IN_AN_INDEX}
"""Names allowed in an index. BytesStorageMetadata is excluded: PyTorch would unpickle such bytes unchecked."""


class _Index(pickle.Unpickler):
    """Resolves names in the pickle by their last part only, so that nothing is imported."""

    def find_class(self, module: str, name: str) -> Any:
        found = IN_AN_INDEX.get(name, getattr(torch, name, None))
        if name in IN_AN_INDEX or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in an index of tensors")


class Reader(FileSystemReader):
    """PyTorch's reader, but with a restricted unpickler: the original runs any code that an index names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            index = _Index(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"{type(index).__name__} is not an index")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def save_state(folder: Path, model: PreTrainedModel, optimizer: Optimizer, optimizer_steps: int) -> None:
    """Writes the state; durable on return. All ranks must call this with one folder. Raises OSError (disk full)."""
    with _one_or_many() as no_dist:
        save(_tensors(model, optimizer, optimizer_steps), checkpoint_id=folder, no_dist=no_dist)


def load_state(folder: Path, model: PreTrainedModel, optimizer: Optimizer) -> int:
    """Restores model, optimizer and torch's random generator; returns the number of optimizer steps. Raises ConfigError
    if the checkpoint belongs to other settings, and other errors if the folder is damaged."""
    tensors = _tensors(model, optimizer, 0)
    _read(folder, tensors, model)
    settings = get_optimizer_state_dict(model, optimizer)["param_groups"]
    set_optimizer_state_dict(model, optimizer, {"state": tensors["optimizer"], "param_groups": settings})
    torch.set_rng_state(tensors["rng"])
    return int(tensors["updates"])


def load_weights(folder: Path, model: PreTrainedModel) -> None:
    """Loads the model from what `save_state` wrote, without the optimizer. Raises as `load_state` does."""
    _read(folder, _weights(model), model)


def _read(folder: Path, tensors: dict[str, Any], model: PreTrainedModel) -> None:
    """Reads the named tensors of the checkpoint in place."""
    check_same(folder, tensors["model"])
    with _one_or_many() as no_dist:
        load(tensors, storage_reader=Reader(folder), no_dist=no_dist)
    scaling = lora_scaling(model)
    if scaling is not None and float(tensors["lora_scaling"]) != scaling:
        raise ConfigError(
            f"{folder}: adapters are scaled by {float(tensors['lora_scaling']):g} there, by {scaling:g} here: "
            "lora.alpha must be what this checkpoint was trained with"
        )


def check_same(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Raises ConfigError unless the checkpoint has exactly these tensors. PyTorch's own error would say less."""
    stored = {
        name.removeprefix("model."): tuple(getattr(entry, "size", ()))
        for name, entry in Reader(folder).read_metadata().state_dict_metadata.items()
        if name.startswith("model.")
    }
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differing = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
    if differing:
        name = differing[0]
        there, here = (where.get(name, "not trained") for where in (stored, wanted))
        raise ConfigError(
            f"{folder}: {name} is {there} there, {here} here ({len(differing)} tensors differ): model.path, lora.rank "
            "and lora.targets must be what this checkpoint was trained with"
        )


def _tensors(model: PreTrainedModel, optimizer: Optimizer, optimizer_steps: int) -> dict[str, Any]:
    """Everything that is saved."""
    return {
        **_weights(model),
        "optimizer": get_optimizer_state_dict(model, optimizer)["state"],
        "updates": torch.tensor(optimizer_steps),
        "rng": torch.get_rng_state(),
    }


def _weights(model: PreTrainedModel) -> dict[str, Any]:
    """The model's tensors are its own, so loading into them restores it; frozen parameters come from model.path."""
    scaling = lora_scaling(model)
    return {
        **({} if scaling is None else {"lora_scaling": torch.tensor(scaling, dtype=torch.float64)}),
        "model": get_model_state_dict(model, options=TRAINED),
    }


@contextmanager
def _one_or_many() -> Iterator[bool]:
    """Yields True if there is no process group. Turns a CheckpointException of any rank into an OSError."""
    with warnings.catch_warnings():
        # With no_dist=True, PyTorch warns that there is no process group.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield not dist.is_initialized()
        except CheckpointException as error:  # not an Exception; its text has every rank's traceback
            failures = (f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())
            raise OSError("; ".join(failures)) from error
