"""Loads a model and its weights from a Hugging Face folder: safetensors only, no pickles, no code from the folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from dvp_rl.contract.errors import ConfigError, WeightError
from dvp_rl.weights.layout import predicts_further

from .adapter import holds_adapter, with_adapter
from .kv_cache import ATTENTION, RowCache, read
from .reference import (
    EAGER,
    attend_by,
    attending,
    gap,
    longest_edge,
    some_tokens,
    takes_attention,
    tolerance,
)
from .tokenizer import check_model_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OTHER_MODEL = "config.json and *.safetensors must belong to the same model"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def complete_model(where: str, folder: Path, **options: Any) -> Any:
    """The causal LM in evaluation mode. No weight is missing, and none left over but multi-token-prediction layers.
    `options` go to `from_pretrained`. Raises ConfigError, whose text begins with `where`."""
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        raise ConfigError(f"{where}: cannot be loaded as a causal LM: {error}") from error
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, needed = mismatched[0]
        raise ConfigError(
            f"{where}: {name} has shape {list(stored)}, but config.json asks for {list(needed)} "
            f"({len(mismatched)} such tensors): {OTHER_MODEL}"
        )
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{where}: {missing[0]} is missing ({len(missing)} in all) and would be random: get every *.safetensors "
            "file of the model"
        )
    if unexpected := sorted(
        name for name in report["unexpected_keys"] if not predicts_further(name, model.config.to_dict())
    ):
        raise ConfigError(
            f"{where}: {unexpected[0]} is not in {type(model).__name__} with this config.json "
            f"({len(unexpected)} such tensors) and would be left out: {OTHER_MODEL}"
        )
    return model


def load_model(folder: Path, *, dtype: torch.dtype, device: torch.device, context_length: int = sys.maxsize) -> Any:
    """The causal LM in evaluation mode, for sequences of at most `context_length` tokens. Raises ConfigError that
    names folder and reason."""
    check_model_folder(folder)
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"model folder {folder}: no *.safetensors file in it (pickled weights are never read)")
    model = complete_model(f"model folder {folder}", folder, dtype=dtype)
    if not takes_attention(model):
        raise ConfigError(f"model type {model.config.model_type} has its own attention; use the sglang engine")
    attend_by(model, ATTENTION)
    if getattr(model, "_is_stateful", False):
        raise ConfigError(f"model type {model.config.model_type} keeps a recurrent state; use the sglang engine")
    model = model.requires_grad_(False).eval().to(device)
    if device.type == "cpu" and dtype == torch.float32:
        _transpose_weights(model)
    _check_step(model, context_length)
    return model


def read_weights(folder: Path, model: Any, base: Path | None = None) -> dict[str, Tensor]:
    """Reads every weight of `model`, by name, from the folder's safetensors, in the model's dtype and on the CPU.

    Raises WeightError that names folder and tensor if a name, shape or dtype does not fit, a value is not finite or
    anything is missing; tied weights may be left out. `model` is not modified. An adapter is added to the weights in
    `base`.
    """
    tied = _tied(model)
    expected = {name: weight for name, weight in model.state_dict().items() if name not in tied}
    adapted = base is not None and holds_adapter(folder)
    whole = base if base is not None and adapted else folder
    converts = bool(getattr(model, "_weight_conversions", None))
    weights = {} if converts else {tied.get(name, name): weight for name, weight in _read_folder(whole).items()}
    if weights.keys() != expected.keys():
        weights = _convert(whole, model, torch.float32 if adapted else model.dtype)
    if adapted:
        weights = with_adapter(folder, weights, _read_folder(folder))
    if missing := sorted(expected.keys() - weights.keys()):
        raise WeightError(f"weight folder {folder}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if foreign := sorted(weights.keys() - expected.keys()):
        raise WeightError(f"weight folder {folder}: tensor {foreign[0]} does not belong to this model")
    return {
        name: _fitting(f"weight folder {folder}: tensor {name}", weights[name], expected[name]) for name in expected
    }


@torch.no_grad()
def swap_weights(model: Any, weights: dict[str, Tensor]) -> None:
    """Copies checked weights into the model in place; tied tensors share storage, so they follow."""
    state = model.state_dict()
    for name, weight in weights.items():
        state[name].copy_(weight)


@torch.no_grad()
def has_linear_head(model: Any) -> bool:
    """Whether the logits are just the product of LM head and last hidden state, without a soft cap or scale. Compares
    both bit for bit on a few tokens."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return False
    ids = torch.arange(8, device=head.weight.device).remainder(head.out_features).unsqueeze(0)
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.equal(head(states), model(input_ids=ids, use_cache=False).logits)


@torch.inference_mode()
def _check_step(model: Any, context_length: int) -> None:
    """Raises ConfigError unless a step over our cache, after a prompt that was read in two parts, gives the logits of
    Transformers' eager forward, also past the end of a layer's window.

    Llama-style full attention passes. An architecture that biases, caps or stores attention in its own way does not; it
    would sample from another model than the trainer's.
    """
    kind = model.config.model_type
    tried_edge, edge = longest_edge(model, below=context_length, num_sequences=2)
    if tried_edge < edge:
        raise ConfigError(
            f"model type {kind}: its layers change at {edge} tokens, and a trial of that length would take too long "
            f"here; set max_context to {edge} or less, or use the sglang engine"
        )
    ids = some_tokens(model, tried_edge + 8)[None]
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    try:
        cache, (_, prompt) = RowCache(), read(model, ids[:, :4])
        read(model, ids[:, 4:-1], prompt)
        cache.fill(0, prompt, torch.zeros(1, dtype=torch.long, device=model.device))
        cache.reserve(1, ids.shape[1])
        cache.aim(positions[0, -1:], ids.shape[1])
        ours = model(input_ids=ids[:, -1:], position_ids=positions[:, -1:], past_key_values=cache, use_cache=True)
        with attending(model, EAGER):
            theirs = model(input_ids=ids, use_cache=False)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - foreign architectures may raise any type
        raise ConfigError(f"model type {kind} cannot run here, use the sglang engine: {error}") from None
    if not (found := gap(ours.logits[0, -1], theirs.logits[0, -1])) <= tolerance(model.dtype):
        raise ConfigError(
            f"model type {kind}: a decode step differs from the plain forward by {found:.3g} standard deviations of "
            f"the logits (at most {tolerance(model.dtype):g} allowed): its attention is not supported here, use the "
            "sglang engine"
        )


def _transpose_weights(model: Any) -> None:
    """Stores linear weights input-major (same shape, other strides): a decode step's matmul gets up to 1.3x faster.

    Tied weights stay as they are, because an embedding reads rows.
    """
    tied = {*_tied(model).keys(), *_tied(model).values()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" not in tied:
            module.weight.data = module.weight.data.t().contiguous().t()


def _read_folder(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightError(f"weight folder {folder}: no *.safetensors file in it")
    return {name: weight for file in files for name, weight in _read_file(file).items()}


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        weights: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: PyTorch cannot open the file
        raise WeightError(f"{file}: cannot be read as safetensors: {error}") from None
    return weights


def _convert(folder: Path, model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Reads, with Transformers' own loader, weights that some architectures store under other names or in other pieces,
    such as experts. Names that the loader could not place map to empty tensors.
    """
    try:
        fresh, report = type(model).from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # noqa: BLE001 - as in _check_step
        raise WeightError(f"weight folder {folder}: does not fit {type(model).__name__}: {error}") from None
    found = {name: weight for name, weight in fresh.state_dict().items() if name not in _tied(fresh)}
    empty = torch.empty(0)
    return {name: w for name, w in found.items() if name not in report["missing_keys"]} | {
        name: empty for name in report["unexpected_keys"] if not predicts_further(name, model.config.to_dict())
    }


def _fitting(what: str, weight: Tensor, expected: Tensor) -> Tensor:
    if weight.shape != expected.shape:
        raise WeightError(f"{what} has shape {list(weight.shape)}, the model needs {list(expected.shape)}")
    if weight.dtype != expected.dtype and not (weight.dtype in FLOATS and expected.dtype in FLOATS):
        raise WeightError(f"{what} is {weight.dtype}, the model needs {expected.dtype} or another float type")
    weight = weight.to(expected.dtype)
    if not torch.isfinite(weight).all():
        raise WeightError(f"{what} holds NaN or infinity")
    return weight


def _tied(model: Any) -> dict[str, str]:
    """Names of tied tensors, mapped to the names of the tensors whose storage they share."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return tied
