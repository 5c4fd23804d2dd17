"""Zero mismatch: with one shape and the same weights, engine and trainer compute the same log-probs, bit for bit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.group import Group, Sample
from dvp_rl.contract.job import Job, Sink, job_id
from dvp_rl.contract.sampling import Sampling
from dvp_rl.contract.shape import Shape
from dvp_rl.dvp.evidence import Evidence
from dvp_rl.engines.tokenizer import load_tokenizer
from dvp_rl.engines.transformers import TransformersEngine
from dvp_trainer.config import TrainSettings
from dvp_trainer.data.batch import Batch, ScoredGroup
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner
from tests.kit.devices import device
from tests.kit.models import FAMILIES, make_model

DEMO = Path(__file__).parents[3] / "deploy/demo"
LOG_MIN_P = -3.0
CPU = torch.device("cpu")

__all__ = ["device"]


class Setup(NamedTuple):
    engine: TransformersEngine
    learner: Learner

    @classmethod
    async def start(cls, folder: Path, shape: Shape, device: torch.device, *, trained: Shape | None = None) -> Setup:
        torch.set_num_threads(1)
        settings = TrainSettings(
            run_id="zero",
            out_dir=folder,
            steps=1,
            model={"path": folder, "fixed_shape": str(trained or shape), "device": str(device)},
            data={"train": "unused.jsonl"},
            reward={"name": "exact_match"},
            sampling={"log_min_p": LOG_MIN_P},
            optimizer={"lr": 1e-3},
        )
        engine = TransformersEngine(folder, device=str(device), max_batch=2 * shape.rows + 1, fixed_shape=shape)
        await engine.start()
        return cls(engine, Learner(load_model(settings.model), settings, pad_id=0))

    async def draw(self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int) -> Batch:
        """Draws a batch; its rewards give every group a signal."""
        jobs = [
            Job(
                job_id=job_id("zero", number, 0),
                run_id="zero",
                prompt_ids=prompt,
                n=n,
                sampling=Sampling(log_min_p=LOG_MIN_P, max_tokens=max_tokens),
                sink=Sink.TRAIN,
            )
            for number, prompt in enumerate(prompts)
        ]
        drawn = await asyncio.gather(*map(self.engine.generate, jobs))
        return Batch(tuple(self.scored(job, samples) for job, samples in zip(jobs, drawn, strict=True)))

    def scored(self, job: Job, samples: tuple[Sample, ...]) -> ScoredGroup:
        group = Group(
            **job.model_dump(include={"job_id", "run_id", "prompt_ids", "sampling", "sink"}),
            samples=samples,
            replica_id="replica",
            engine=self.engine.facts,
        )
        return ScoredGroup(group, tuple(float(i) for i in range(len(samples))), staleness=0)

    def look(self, batch: Batch) -> Evidence:
        seen = self.learner.look(batch.episodes())
        assert seen is not None
        return seen


def largest_difference(seen: Evidence) -> float:
    """Largest difference between the log-probs of both sides."""
    return float((seen.train.logprobs - seen.infer.logprobs)[seen.mask].abs().max())


def agree(seen: Evidence) -> bool:
    """True if both sides agree exactly on all fields of all model tokens."""
    mask = seen.mask
    return (
        bool(seen.train.inside[mask].all())
        and largest_difference(seen) == 0.0
        and torch.equal(seen.train.kept_mass[mask], seen.infer.kept_mass[mask])
        and torch.equal(seen.train.kept_count[mask].long(), seen.infer.kept_count[mask].long())
    )


@pytest.mark.parametrize("family", FAMILIES)
async def test_both_sides_agree_to_the_last_bit_also_after_a_step(
    family: str, device: torch.device, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", family, spread=2.0)
    setup = await Setup.start(folder, Shape(5, 24), device)
    prompts = [list(range(5, 6 + 2 * i)) for i in range(4)]
    before = await setup.draw(prompts, n=6, max_tokens=12)
    assert agree(setup.look(before))

    metrics = setup.learner.step(before)
    assert (metrics["mismatch/ratio_min"], metrics["mismatch/ratio_max"], metrics["veto/total"]) == (1.0, 1.0, 0.0)
    assert metrics["optimizer/updates"] == 1
    assert not agree(setup.look(before))  # the weights have changed
    pushed = tmp_path / "pushed"
    pushed.mkdir()
    setup.learner.write_weights(pushed)
    await setup.engine.load(pushed, "zero:1:aa")
    assert agree(setup.look(await setup.draw(prompts, n=6, max_tokens=12)))
    await setup.engine.close()


async def test_another_shape_is_another_computation(device: torch.device, tmp_path: Path) -> None:
    """Shows that the test above can fail."""
    folder = make_model(tmp_path / "model", spread=2.0)
    setup = await Setup.start(folder, Shape(1, 31), device, trained=Shape(8, 32))
    assert 0.0 < largest_difference(setup.look(await setup.draw([[5, 6], [7, 8, 9]], n=6, max_tokens=20))) < 1e-4
    await setup.engine.close()


async def test_sequences_too_long_for_the_shape_are_refused(tmp_path: Path) -> None:
    setup = await Setup.start(make_model(tmp_path / "model", endless=True), Shape(2, 16), CPU, trained=Shape(2, 12))
    batch = await setup.draw([[5, 6]], n=2, max_tokens=14)
    with pytest.raises(ConfigError, match=r"model.fixed_shape 2x12: got a sequence of 2 \+ 14 tokens"):
        setup.learner.step(batch)
    await setup.engine.close()


@pytest.mark.slow
async def test_fifty_thousand_tokens_of_the_demo_model(device: torch.device) -> None:
    setup = await Setup.start(DEMO / "model", Shape(64, 16), device)
    encode = load_tokenizer(DEMO / "model").encode
    prompts = [encode(json.loads(line)["prompt"]) for line in (DEMO / "train.jsonl").read_text().splitlines()]
    tokens = 0
    while tokens < 50_000:
        batch, prompts = await setup.draw(prompts[:200], n=8, max_tokens=6), prompts[200:]
        assert agree(setup.look(batch))
        tokens += batch.num_model_tokens
    await setup.engine.close()
