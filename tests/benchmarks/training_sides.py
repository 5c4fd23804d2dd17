"""One side of `training`, in a process of its own; also in an environment without dvp-rl (TRL) or without TRL (ours).

python -m tests.benchmarks.training_sides '{"side": "packed", "model": .., "batch": .., ...}'    (as training.run does)
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers

from tests.kit.models import PAD_ID

LR = 1e-6


class Meter:
    """Seconds of each step, and the peak of memory after the warm-up."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._warm_up, self._cuda = task["warm_up"], task["device"] == "cuda"
        self._seconds: list[float] = []

    def start(self) -> None:
        self._wait()
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._wait()
        self._seconds.append(time.perf_counter() - self._began)
        if self._cuda and len(self._seconds) == self._warm_up:
            torch.cuda.reset_peak_memory_stats()

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def result(self) -> dict[str, Any]:
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        peak = torch.cuda.max_memory_allocated() / 2**20 if self._cuda else rss
        return {"step_s": self._seconds[self._warm_up :], "warm_up_s": self._seconds[: self._warm_up], "peak_mib": peak}


def wait_for_turn() -> None:
    """Ends the process instead if `training` has ended."""
    print("ready", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("not run")


def run_ours(task: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    from dvp_rl.dvp.lm_head import head_logprobs
    from dvp_trainer.config import TrainSettings
    from dvp_trainer.data.batch import Batch
    from dvp_trainer.learn.arrangement import Arrangement, Beside
    from dvp_trainer.learn.model import load_model, shard
    from dvp_trainer.learn.step import Learner, adamw
    from tests.kit.records import make_sample, make_scored

    wait_for_turn()
    data, device, sharded = json.loads(Path(task["batch"]).read_text()), task["device"], "sharded" in task
    settings = TrainSettings.model_validate(
        {
            "run_id": "training",
            "out_dir": task["model"],
            "steps": 1,
            "model": {
                "path": task["model"],
                "device": device,
                "compute_dtype": "bfloat16",
                "gradient_checkpointing": "checkpointed" in task,
                "micro_batch_tokens": task["micro_tokens"],
            },
            "data": {"train": "unused.jsonl"},
            "reward": {"name": "exact_match"},
            "optimizer": {"lr": LR},
            # Every sequence counts, whatever its made-up engine log-probs.
            "correction": {"veto": None, "mode": "unit"},
        }
    )
    groups = zip(data["prompts"], data["samples"], data["rewards"], strict=True)
    made_up = -math.log(task["text"])
    batch = Batch(tuple(make_scored(p, [make_sample(ids, [made_up] * len(ids)) for ids in s], r) for p, s, r in groups))
    if sharded:
        if device == "cuda":
            torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{task['batch']}.store", rank=0, world_size=1)
    learner = Learner(load_model(settings.model, sharded=sharded), settings, PAD_ID)
    if sharded:  # as Learner does with several ranks
        shard(learner.policy, learner.device, learner.world)
        learner.optimizer = adamw(learner.model, settings.optimizer, learner.device)
    if "padded" in task:
        learner.policy.attend(Arrangement(Beside.PADDED, "sdpa"))
    else:
        assert learner.policy.arrangement.beside is Beside.PACKED, f"sequences are {learner.policy.arrangement}"
    meter = Meter(task)
    with patch("dvp_trainer.learn.model.head_logprobs", wraps=head_logprobs) as head:
        for _ in range(task["warm_up"] + task["repeats"]):
            meter.start()
            metrics = learner.step(batch)
            meter.stop()
            assert metrics["optimizer/updates"] == 1, "no update"
            assert metrics["veto/total"] == 0, "a token is outside the kept set"
    if sharded:
        dist.destroy_process_group()
    return meter.result() | {
        "layout": str(learner.policy.arrangement),
        "attention": learner.policy.arrangement.attention,
        "weights": str(next(learner.model.parameters()).dtype),
        "compute": str(learner.policy.low_dtype),
        "optimizer": describe(learner.optimizer),
        "micro_batches": head.call_count // (task["warm_up"] + task["repeats"]),
        "head_logprobs": head.called,
        "kept": metrics["kept/count_mean_train"],
        "grad_norm": metrics["grad/norm"],
    }


def run_trl(task: dict[str, Any]) -> dict[str, Any]:
    import trl  # type: ignore[import-not-found, unused-ignore]
    from datasets import Dataset
    from transformers import TrainerCallback

    config, trainer_type = trl.GRPOConfig, trl.GRPOTrainer  # imported only when they are named
    wait_for_turn()
    data, meter = json.loads(Path(task["batch"]).read_text()), Meter(task)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.stop()

    samples = [ids for group in data["samples"] for ids in group]
    steps = len(samples) // task["micro_rows"]
    settings = config(
        output_dir=str(Path(task["model"]).parent / "trl"),
        max_steps=task["warm_up"] + task["repeats"],
        per_device_train_batch_size=task["micro_rows"],
        gradient_accumulation_steps=steps,
        num_generations=task["n"],
        max_completion_length=task["longest"],
        learning_rate=LR,
        lr_scheduler_type="constant",
        use_cpu=task["device"] == "cpu",
        gradient_checkpointing="checkpointed" in task,
        use_liger_kernel="liger" in task,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trainer_type(
        model=task["model"],
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "0"}] * len(samples)),
        callbacks=[Clock()],
    )
    device = trainer.accelerator.device

    def padded(rows: list[list[int]], *, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = (np.zeros((len(rows), max(map(len, rows))), np.int64) for _ in range(2))
        for line, used, row in zip(ids, mask, rows, strict=True):
            place = slice(len(line) - len(row), None) if left else slice(len(row))
            line[place], used[place] = row, 1
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    prompts = [ids for ids, group in zip(data["prompts"], data["samples"], strict=True) for _ in group]
    prompt_ids, prompt_mask = padded(prompts, left=True)
    completion_ids, completion_mask = padded(samples)
    rewards = torch.tensor(data["rewards"], device=device)
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).flatten(),
        "num_items_in_batch": completion_mask.sum(),
    }
    trainer._generate_and_score_completions = lambda _: dict(batch)
    loss = trainer.train().training_loss
    model = trainer.accelerator.unwrap_model(trainer.model)
    return meter.result() | {
        "layout": "padded",
        "attention": model.config._attn_implementation,
        "weights": str(next(model.parameters()).dtype),
        "compute": f"autocast {trainer.accelerator.mixed_precision}",
        "optimizer": describe(trainer.optimizer),
        "micro_batches": steps,
        "loss": loss,
        "trl": trl.__version__,
    }


def describe(optimizer: Any) -> str:
    """Class and form of an optimizer, which Accelerate may have wrapped."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return f"{type(inner).__name__} {'fused' if inner.defaults.get('fused') else 'default'}"


def main() -> None:
    task = json.loads(sys.argv[1])
    found = (run_trl if "trl" in task else run_ours)(task)
    found |= {"torch": torch.__version__, "transformers": transformers.__version__}
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
