"""Model, optimizer and generator on disk: a folder of PyTorch's distributed checkpoint format.

Every rank writes what it holds, and another number of ranks can read it. The folder is trusted: PyTorch unpickles the
index in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from transformers import PreTrainedModel

from services.contract.errors import ConfigError

from .lora import lora_scaling

TRAINED = StateDictOptions(ignore_frozen_params=True)


def save_state(folder: Path, model: PreTrainedModel, optimizer: Optimizer, optimizer_steps: int) -> None:
    """Durable before it returns. All ranks call it with one folder. Raises OSError (disk full)."""
    try:
        with _one_or_many() as no_dist:
            save(_tensors(model, optimizer, optimizer_steps), checkpoint_id=folder, no_dist=no_dist)
    except CheckpointException as error:  # no Exception, and in its words a traceback of every rank
        failures = (f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())
        raise OSError("; ".join(failures)) from error


def load_state(folder: Path, model: PreTrainedModel, optimizer: Optimizer) -> int:
    """Makes model, optimizer and torch's generator what they were; returns the number of optimizer steps."""
    tensors = _tensors(model, optimizer, 0)
    check_same(folder, tensors["model"])
    with _one_or_many() as no_dist:
        load(tensors, checkpoint_id=folder, no_dist=no_dist)
    scaling = lora_scaling(model)
    if scaling is not None and float(tensors["lora_scaling"]) != scaling:
        raise ConfigError(
            f"{folder}: adapters count {float(tensors['lora_scaling']):g} times there, {scaling:g} times here: "
            "lora.alpha must be what this checkpoint was trained with"
        )
    settings = get_optimizer_state_dict(model, optimizer)["param_groups"]
    set_optimizer_state_dict(model, optimizer, {"state": tensors["optimizer"], "param_groups": settings})
    torch.set_rng_state(tensors["rng"])
    return int(tensors["updates"])


def check_same(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Raises ConfigError unless the checkpoint is one of these tensors: PyTorch would say less."""
    stored = {
        name.removeprefix("model."): tuple(getattr(entry, "size", ()))
        for name, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
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
    """Those of the model are its own: to load into them is all it takes. What is frozen comes from model.path."""
    scaling = lora_scaling(model)
    return {
        **({} if scaling is None else {"lora_scaling": torch.tensor(scaling, dtype=torch.float64)}),
        "model": get_model_state_dict(model, options=TRAINED),
        "optimizer": get_optimizer_state_dict(model, optimizer)["state"],
        "updates": torch.tensor(optimizer_steps),
        "rng": torch.get_rng_state(),
    }


@contextmanager
def _one_or_many() -> Iterator[bool]:
    with warnings.catch_warnings():
        # Told to do without a process group, PyTorch warns that there is none.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield not dist.is_initialized()
