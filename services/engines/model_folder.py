"""A model and its weights from a Hugging Face folder: safetensors only, nothing is unpickled, no code is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from services.contract.errors import ConfigError, WeightError

from .kv_cache import ATTENTION
from .tokenizer import check_model_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_full_attention(config: Any, context_length: int) -> None:
    """Raises ConfigError unless every layer attends to the whole context."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    for kind in sorted(set(kinds)):
        if kind == "full_attention" or (kind == "sliding_attention" and window and window >= context_length):
            continue
        cure = f"set max_context to {window} or less, or " if kind == "sliding_attention" else ""
        raise ConfigError(
            f"model type {config.model_type}: a layer is {kind} (window {window}, context {context_length}), the "
            f"transformers engine has full attention only; {cure}use the sglang engine"
        )


def load_model(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal LM in evaluation mode. Raises ConfigError naming folder and reason."""
    check_model_folder(folder)
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"model folder {folder}: no *.safetensors file in it (pickled weights are never read)")
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # noqa: BLE001 - Hugging Face and safetensors raise many types for a bad folder
        raise ConfigError(f"model folder {folder}: cannot be loaded as a causal LM: {error}") from None
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"model folder {folder}: weights are missing, first {missing[0]} ({len(missing)} in all)")
    if getattr(model, "_is_stateful", False):
        raise ConfigError(f"model type {model.config.model_type} keeps a recurrent state; use the sglang engine")
    model = model.requires_grad_(False).eval().to(device)
    if device.type == "cpu" and dtype == torch.float32:
        _transpose_weights(model)
    return model


def read_weights(folder: Path, model: Any) -> dict[str, Tensor]:
    """Every weight of `model`, by name, from the folder's safetensors, in the model's dtype and on the CPU.

    Raises WeightError naming file and tensor if a name, shape or dtype does not fit, if a value is not finite, or if
    anything is missing; tied weights may be left out. `model` is only read.
    """
    expected = {name: weight for name, weight in model.state_dict().items() if name not in _tied(model)}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightError(f"weight folder {folder}: no *.safetensors file in it")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights.update(_read_file(file, expected, _tied(model)))
    if missing := sorted(expected.keys() - weights.keys()):
        raise WeightError(f"weight folder {folder}: tensor {missing[0]} is missing ({len(missing)} in all)")
    return weights


@torch.no_grad()
def swap_weights(model: Any, weights: dict[str, Tensor]) -> None:
    """Copies checked weights in place; tied tensors share storage, so they follow."""
    state = model.state_dict()
    for name, weight in weights.items():
        state[name].copy_(weight)


def _transpose_weights(model: Any) -> None:
    """Stores linear weights input-major, same shape, other strides: a decode step's matmul is up to 1.3x faster so.

    Tied ones stay, because an embedding reads rows.
    """
    tied = {*_tied(model).keys(), *_tied(model).values()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" not in tied:
            module.weight.data = module.weight.data.t().contiguous().t()


def _read_file(file: Path, expected: dict[str, Tensor], tied: dict[str, str]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 - not a mapping
                name = tied.get(stored, stored)
                if name not in expected:
                    raise WeightError(f"{file}: tensor {stored} does not belong to this model")
                weights[name] = _fitting(f"{file}: tensor {stored}", tensors.get_tensor(stored), expected[name])
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{file}: not a complete safetensors file: {error}") from None
    return weights


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
    """Tensors that share another one's storage, by the name of that one."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return tied
