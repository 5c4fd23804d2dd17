"""Both sides' log-probs of every token of a batch on disk, for `dvp-lab signature --run`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dvp_rl.contract.errors import ConfigError
from dvp_rl.dvp.evidence import Evidence
from dvp_trainer.learn.weight_files import save_tensors

FOLDER = "tokens"


def write_tokens(evidence: Evidence, out_dir: Path, step: int) -> None:
    """Writes `Evidence.tensors` to out_dir/tokens/step-NNNNNNNN.safetensors."""
    folder = out_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in evidence.tensors().items()}
    save_tensors(tensors, folder / f"step-{step:08d}.safetensors")


def read_tokens(out_dir: Path) -> Iterator[Evidence]:
    """The records in order of steps. Raises ConfigError if there are none, or if one is damaged."""
    files = sorted((out_dir / FOLDER).glob("step-*.safetensors"))
    if not files:
        raise ConfigError(f"run {out_dir}: no {FOLDER}/step-*.safetensors; train it with --report.tokens-interval 1")
    for file in files:
        try:
            tensors = load_file(file)
            if "inside" in tensors:  # written by an earlier version
                tensors |= {"train_inside": tensors["inside"], "infer_inside": torch.ones_like(tensors["mask"])}
            yield Evidence.of(tensors)
        except (SafetensorError, OSError, KeyError) as error:
            raise ConfigError(f"{file}: not a complete record of a batch: {error}") from None
