"""A learner on as many ranks as torchrun starts: takes a few fixed steps, then writes its state, weights and metrics.

torchrun --nproc-per-node 2 -m tests.integration.trainer.ranked OUT_DIR [--resume STATE_FOLDER]
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dvp_trainer.config import TrainSettings
from dvp_trainer.learn.step import Learner, open_learner
from dvp_trainer.learn.world import World
from tests.kit.wait import WITHIN_S
from tests.unit.trainer.golden import make_batch

STEPS, LR = 3, 5e-5


def make_settings(
    out_dir: Path, model: Path, compute_dtype: str, lora_rank: int, gradient_checkpointing: bool
) -> TrainSettings:
    return TrainSettings.model_validate(
        {
            "run_id": "ranked",
            "out_dir": out_dir,
            "steps": STEPS,
            "model": {
                "path": model,
                "micro_batch_tokens": 32,
                "compute_dtype": compute_dtype,
                "gradient_checkpointing": gradient_checkpointing,
            },
            "lora": {"rank": lora_rank},
            "data": {"train": "unused.jsonl"},
            "reward": {"name": "exact_match"},
            "sampling": {"n": 4, "log_min_p": -13.0},
            "correction": {"veto": 1e-4, "baseline": "rloo_weighted"},
            "optimizer": {"lr": LR if not lora_rank else 1e-3},
        }
    )


def local_bytes(learner: Learner) -> int:
    """Size of parameters and optimizer state on this rank."""
    state = [value for values in learner.optimizer.state.values() for value in values.values()]
    tensors = [*learner.model.parameters(), *(value for value in state if isinstance(value, Tensor))]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--compute-dtype", default="float32")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = make_settings(
        arguments.out_dir,
        arguments.model,
        arguments.compute_dtype,
        arguments.lora_rank,
        arguments.gradient_checkpointing,
    )
    with World.joined("cpu", WITHIN_S) as world:
        learner = open_learner(settings, 0, world)
        if not world.leads:
            for order in world.orders():
                learner.obey(order)
        else:
            lead(learner, arguments.out_dir, arguments.resume)
        (arguments.out_dir / f"bytes-{world.rank}").write_text(str(local_bytes(learner)))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        (arguments.out_dir / f"peak-{world.rank}").write_text(str(peak))


def lead(learner: Learner, out_dir: Path, resume: Path | None) -> None:
    if resume is not None:
        learner.load(resume)
    rng = np.random.default_rng(0)
    metrics = [learner.step(make_batch(rng)) for _ in range(STEPS)]
    (out_dir / "metrics.json").write_text(json.dumps(metrics))
    learner.save(out_dir / "state")
    (out_dir / "weights").mkdir()
    learner.write_weights(out_dir / "weights")


if __name__ == "__main__":
    main()
