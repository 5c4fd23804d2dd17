"""The model's weights in the format of a Hugging Face folder, which engines read.

Transformers holds some weights in other pieces and under other names, for example all experts of a layer in one tensor.
The conversions made on loading are reversed as in `save_pretrained`, but one tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from dvp_rl.engines import adapter

from .lora import ADAPTER, adapters, merged
from .model import full
from .world import World

INDEX = "model.safetensors.index.json"


def write_weights(model: PreTrainedModel, folder: Path, dtype: torch.dtype, world: World) -> None:
    """Writes `model.safetensors`, or one file per rank and an index. Floats are in `dtype`, adapters merged.

    Parameters are gathered one at a time and divided among the ranks, so that no rank ever holds all of them. All ranks
    must call this with the same folder. Raises OSError (disk full) on every rank if one cannot write.
    """
    mine: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    for position, (name, whole) in enumerate(stored_tensors(model)):
        owner = position % world.size
        weight_map[name] = file_name(owner, world.size)
        if owner == world.rank:
            mine[name] = _alone(whole.to("cpu", dtype if whole.is_floating_point() else None).contiguous())
    file = folder / file_name(world.rank, world.size)
    _together(lambda: save_tensors(mine, file, format="pt"), world)
    if world.leads and world.size > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))


def write_adapter(model: PreTrainedModel, folder: Path, base_digest: str, world: World) -> None:
    """The leader writes the adapter in PEFT's format, and `base_digest`, by which a replica checks that it was started
    with the same model.

    All ranks must call this. Raises OSError (disk full) on every rank.
    """
    tensors = {name: full(tensor.detach()).cpu().contiguous() for name, tensor in adapters(model)}

    def write() -> None:
        if world.leads:
            model.peft_config[ADAPTER].save_pretrained(folder)
            (folder / adapter.BASE).write_text(json.dumps({"digest": base_digest}))
            save_tensors(tensors, folder / adapter.WEIGHTS, format="pt")

    _together(write, world)


def save_tensors(tensors: dict[str, Tensor], file: Path, **metadata: str) -> None:
    """Writes a safetensors file with the default permissions of new files. `save_file` makes it readable by its owner
    only, and a replica may run as another user."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata=metadata)
    file.chmod(mode)


def _together(write: Callable[[], None], world: World) -> None:
    """Calls `write`. Raises OSError on every rank if it fails on one."""
    problem = None
    try:
        write()
    except (OSError, SafetensorError) as error:
        problem = error
    failed = int(world.sum(problem is not None)[0])
    if failed:
        raise OSError(f"{failed} of {world.size} ranks could not write: {problem or 'see their logs'}")


def stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as `save_pretrained` would write them, adapters merged. Parameters are gathered one at a time,
    or together if they form one stored tensor, so every rank must consume all."""
    undone = [conversion.reverse_transform() for conversion in reversed(model._weight_conversions)]
    converters = [transform for transform in undone if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in undone if isinstance(transform, WeightRenaming)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    transforms: dict[str, WeightTransform] = {}
    # Same order as revert_weight_conversion: some renamings depend on earlier ones.
    for name, whole in sorted(merged(model, unique_tensors(model)), key=lambda item: dot_natural_key(item[0])):
        target, pattern = rename_source_key(name, renamings, converters, reverse=True)
        fresh = WeightRenaming(name, target) if pattern is None else deepcopy(of_pattern[pattern])
        transforms.setdefault(target, fresh).add_tensor(target, name, pattern or name, whole)
    for target, transform in transforms.items():
        for name, made in transform.convert(target, model=model, config=model.config).items():
            yield name, made[0] if isinstance(made, list) else made


def unique_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The state dict with tied tensors once, under the name that the others are tied to."""
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if state.get(model.all_tied_weights_keys.get(name)) is not tensor:
            yield name, tensor


def _alone(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is a view that would keep a larger tensor in memory."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def file_name(rank: int, size: int) -> str:
    return "model.safetensors" if size == 1 else f"model-{rank + 1:05d}-of-{size:05d}.safetensors"
