"""A real SGLang serves a mixture of experts as the trainer published it, experts included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dvp_rl.engines.sglang import SglangEngine
from dvp_trainer.config import ModelSection
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.weight_files import write_weights
from dvp_trainer.learn.world import World
from tests.integration.engines.jobs import make_job
from tests.integration.engines.oracle import Oracle
from tests.integration.engines.servers import launch_sglang
from tests.kit.families import write_small_model


def publish(source: Path, model: Path, folder: Path) -> Path:
    """Writes the weights of `model` as the trainer does, next to the other files of `source`."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    write_weights(load_model(ModelSection(path=model)), folder, torch.float32, World())
    return folder


# Not qwen2_moe: its shared expert is a Triton kernel even on a CPU ("0 active drivers").
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        *(pytest.param(model_type, marks=pytest.mark.long) for model_type in ("mixtral", "olmoe")),
    ],
)
async def test_sglang_serves_published_experts(tmp_path: Path, model_type: str) -> None:
    even, odd = (write_small_model(tmp_path / str(seed), model_type, seed=seed) for seed in (0, 1))
    published = publish(even, odd, tmp_path / "published")
    engine = SglangEngine(even, launch_sglang(max_batch=8), version="run:0:even")
    await engine.start()
    try:
        job = make_job("before", n=2)
        Oracle(even).check_all(job, await engine.generate(job))
        await engine.load(published, "run:1:odd")
        job = make_job("after", n=2)
        Oracle(odd).check_all(job, await engine.generate(job))
    finally:
        await engine.close()
