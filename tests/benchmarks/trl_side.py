"""TRL's side of `against_trl`: one run of its GRPOTrainer, in the environment `.trl`, where dvp-rl is not installed.

python -m tests.benchmarks.trl_side '{"model": .., "prompts": .., "out": .., ...}'    (as against_trl.Bench.trl does)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.benchmarks.even_words import even_words


class Clock(TrainerCallback):  # type: ignore[misc]
    """Records the time at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())


def reward(completions: list[str], **_: Any) -> list[float]:
    return [even_words(text, None, prompt="", extra={}) for text in completions]


def main() -> None:
    task = json.loads(sys.argv[1])
    settings = GRPOConfig(
        output_dir=task["out"],
        seed=task["seed"],
        max_steps=task["steps"],
        per_device_train_batch_size=task["batch"],
        num_generations=task["n"],
        max_completion_length=task["max_tokens"],
        learning_rate=task["lr"],
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        lr_scheduler_type="constant",
        bf16=task["bf16"],
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    prompts = [json.loads(line) for line in Path(task["prompts"]).read_text().splitlines()]
    clock = Clock()
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[clock],
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"ends": clock.ends, "rewards": rewards}))


if __name__ == "__main__":
    main()
