"""A learner on as many ranks as torchrun starts: takes a few fixed steps, then writes its state, weights and metrics.

torchrun --nproc-per-node 2 -m tests.integration.trainer.ranked OUT_DIR [--resume STATE_FOLDER] [--forked]
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
from dvp_trainer.data.batch import Batch
from dvp_trainer.learn.step import Learner, open_learner
from dvp_trainer.learn.world import World
from tests.kit.records import make_scored
from tests.kit.wait import WITHIN_S
from tests.unit.trainer.golden import make_batch

STEPS, LR = 3, 5e-5
FORKED_TOKENS = 16
"""Limit of a micro-batch with --forked: some episodes exceed it."""


def make_settings(arguments: argparse.Namespace) -> TrainSettings:
    return TrainSettings.model_validate(
        {
            "run_id": "ranked",
            "out_dir": arguments.out_dir,
            "steps": STEPS,
            "model": {
                "path": arguments.model,
                "micro_batch_tokens": FORKED_TOKENS if arguments.forked else 32,
                "compute_dtype": arguments.compute_dtype,
                "gradient_checkpointing": arguments.gradient_checkpointing,
            },
            "lora": {"rank": arguments.lora_rank},
            "data": {"train": "unused.jsonl"},
            "reward": {"name": "exact_match"},
            "sampling": {"n": 4, "log_min_p": -13.0},
            "correction": {"veto": 1e-4, "baseline": "rloo_weighted"},
            "optimizer": {"lr": LR if not arguments.lora_rank else 1e-3},
        }
    )


def local_bytes(learner: Learner) -> int:
    """Size of parameters and optimizer state on this rank."""
    state = [value for values in learner.optimizer.state.values() for value in values.values()]
    tensors = [*learner.model.parameters(), *(value for value in state if isinstance(value, Tensor))]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def with_forks(batch: Batch) -> Batch:
    """Half as many groups, whose episodes have two samples: one of each of two groups."""
    groups = []
    for one, other in zip(batch.groups[::2], batch.groups[1::2], strict=True):
        fork = {"prompt_ids": other.group.prompt_ids}
        pairs = zip(one.group.samples, other.group.samples, strict=True)
        samples = [sample for first, second in pairs for sample in (first, second.model_copy(update=fork))]
        num = len(one.rewards)
        played = {"episode_sizes": [2] * num, "metrics": [{"forks": 1.0}] * num}
        groups.append(make_scored(one.group.prompt_ids.tolist(), samples, one.rewards, **played))
    return Batch(tuple(groups))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--compute-dtype", default="float32")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--forked", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = make_settings(arguments)
    with World.joined("cpu", WITHIN_S) as world:
        learner = open_learner(settings, 0, world)
        if not world.leads:
            for order in world.orders():
                learner.obey(order)
        else:
            lead(learner, arguments.out_dir, arguments.resume, forked=arguments.forked)
        (arguments.out_dir / f"bytes-{world.rank}").write_text(str(local_bytes(learner)))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        (arguments.out_dir / f"peak-{world.rank}").write_text(str(peak))


def lead(learner: Learner, out_dir: Path, resume: Path | None, *, forked: bool) -> None:
    if resume is not None:
        learner.load(resume)
    rng = np.random.default_rng(0)
    batches = [make_batch(rng) for _ in range(STEPS)]
    metrics = [learner.step(with_forks(batch) if forked else batch) for batch in batches]
    (out_dir / "metrics.json").write_text(json.dumps(metrics))
    learner.save(out_dir / "state")
    (out_dir / "weights").mkdir()
    learner.write_weights(out_dir / "weights")


if __name__ == "__main__":
    main()
