"""Faults of an engine that no label or checksum shows, and the canary that does."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dvp_rl.contract.canary import Canary
from dvp_rl.contract.errors import UnavailableError, WeightError
from dvp_rl.contract.group import Sample
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.engines.fake import FakeEngine
from dvp_rl.engines.transformers import TransformersEngine
from dvp_rl.rollout.canary import Guard
from dvp_rl.rollout.engine import ENGINE_ATTRIBUTES, ENGINE_METHODS
from dvp_rl.rollout.metrics import Metrics
from tests.integration.engines.jobs import held, idle
from tests.kit.models import make_model
from tests.kit.wait import until_async
from tests.unit.trainer.test_canary import canary_of, learner_of

Tensors = dict[str, torch.Tensor]
DOWN, QUERIES = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"


def stale(name: str) -> Callable[[Tensors, Tensors], Tensors]:
    """One tensor of the version before."""
    return lambda after, before: after | {name: before[name]}


FAULTS: dict[str, Callable[[Tensors, Tensors], Tensors]] = {
    "the head of the version before, as where embeddings are tied": stale("lm_head.weight"),
    "a stale tensor": stale(DOWN),
    "a stale norm": stale("model.norm.weight"),
    "a flipped tensor": lambda after, _: after | {QUERIES: -after[QUERIES]},
    "one column of zeros": lambda after, _: after | {DOWN: after[DOWN].index_fill(1, torch.tensor([3]), 0)},
    "another dtype": lambda after, _: {name: tensor.bfloat16().float() for name, tensor in after.items()},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Weights before and after some training."""
    root = tmp_path_factory.mktemp("weights")
    before = make_model(root / "before", spread=2.0)
    after = shutil.copytree(before, root / "after")
    torch.manual_seed(1)
    tensors = load_file(before / "model.safetensors")
    moved = {name: tensor * (1 + 0.02 * torch.randn_like(tensor)) for name, tensor in tensors.items()}
    save_file(moved, after / "model.safetensors", metadata={"format": "pt"})
    return before, after


@pytest.fixture(scope="module")
def canaries(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Canary, Canary]:
    before, after = (canary_of(learner_of(folder, tmp_path_factory.mktemp("run"))) for folder in folders)
    return before, after


@asynccontextmanager
async def guarded(folder: Path, dtype: str = "float32") -> AsyncIterator[tuple[TransformersEngine, Guard]]:
    engine = TransformersEngine(folder, dtype=dtype, max_batch=16, threads=1, version="canary:0:a")
    await engine.start()
    try:
        yield engine, Guard(engine, Metrics(), every_s=600.0)
    finally:
        await engine.close()


async def load(engine: TransformersEngine, guard: Guard, folder: Path, canary: Canary, seq: int) -> None:
    with guard.expecting(f"canary:{seq}:a", canary):
        await engine.load(folder, f"canary:{seq}:a")
    assert guard.unproven
    await guard.examine()
    assert not guard.unproven


@pytest.mark.parametrize("fault", FAULTS)
async def test_wrong_weights_are_found(
    fault: str, folders: tuple[Path, Path], canaries: tuple[Canary, Canary], tmp_path: Path
) -> None:
    before, after = folders
    wrong = shutil.copytree(after, tmp_path / "wrong")
    tensors = FAULTS[fault](*(load_file(folder / "model.safetensors") for folder in (after, before)))
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    async with guarded(before) as (engine, guard):
        await load(engine, guard, before, canaries[0], 1)
        assert guard.limit is not None
        assert guard.limit < 1e-4
        with pytest.raises(WeightError):
            await load(engine, guard, wrong, canaries[1], 2)
        assert guard.unproven
        assert guard.wrong
        assert guard.num_wrong == 1
        await load(engine, guard, after, canaries[1], 2)
        assert not guard.wrong
        with pytest.raises(WeightError):
            await load(engine, guard, before, canaries[1], 3)


@pytest.mark.parametrize("served", ["float32", "bfloat16"])
@pytest.mark.parametrize("trained", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["deploy/demo/model", "deploy/demo/calculator/model"])
async def test_trainer_and_engine_may_compute_in_different_formats(
    model: str, trained: str, served: str, tmp_path: Path
) -> None:
    """As in the demo. Exact counts of one side are not those of the other."""
    folder = Path(__file__).parents[3] / model
    canary = canary_of(learner_of(folder, tmp_path, model__compute_dtype=trained, sampling__log_min_p="-3"))
    async with guarded(folder, served) as (engine, guard):
        await load(engine, guard, folder, canary, 1)
        assert not guard.wrong


async def test_wrong_positions_are_found_at_once(
    folders: tuple[Path, Path], canaries: tuple[Canary, Canary], tmp_path: Path
) -> None:
    wrong = shutil.copytree(folders[0], tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 100
    (wrong / "config.json").write_text(json.dumps(config))
    async with guarded(wrong) as (engine, guard):
        with pytest.raises(WeightError, match="nats on average"):
            await load(engine, guard, folders[0], canaries[0], 1)
        assert guard.limit is None


async def test_another_policy_is_found(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The sets show it, whatever the weights."""
    canary = canary_of(learner_of(folders[0], tmp_path, sampling__log_min_p="-2"))
    async with guarded(folders[0]) as (engine, guard):
        with pytest.raises(WeightError, match="8 of 8 safe sets"):
            await load(engine, guard, folders[0], canary.model_copy(update={"log_min_p": -6.0}), 1)


class Silent(TransformersEngine):
    """An engine that draws nothing when told so."""

    error: Exception | None = None

    async def generate_first(self, job: Job) -> tuple[Sample, ...]:
        if self.error is not None:
            raise self.error
        return await super().generate_first(job)


@pytest.mark.parametrize("error", [UnavailableError("away"), TimeoutError()], ids=["away", "slow"])
async def test_an_engine_that_draws_nothing_is_not_called_wrong(
    error: Exception, folders: tuple[Path, Path], canaries: tuple[Canary, Canary]
) -> None:
    """But it has to be examined before it works."""
    metrics = Metrics()
    engine = Silent(folders[0], max_batch=16, threads=1, version="canary:0:a")
    guard = Guard(engine, metrics, every_s=600.0)
    await engine.start()
    engine.error = error
    with guard.expecting("canary:1:a", canaries[0]):
        await engine.load(folders[0], "canary:1:a")
    with pytest.raises(WeightError, match="was not drawn"):
        await guard.examine()
    assert guard.unproven
    assert guard.is_open({"canary:1:a"})
    assert (guard.wrong, guard.num_wrong) == ("", 0)
    assert guard.failure
    engine.error = None
    await guard.examine()
    assert not guard.unproven
    assert not guard.failure
    outcomes = {name: metrics.canaries.labels(name)._value.get() for name in ("right", "wrong", "undrawn")}
    assert outcomes == {"right": 1, "wrong": 0, "undrawn": 1}
    await engine.close()


async def test_an_engine_that_cannot_draw_is_no_better_than_a_wrong_one(
    folders: tuple[Path, Path], canaries: tuple[Canary, Canary], tmp_path: Path
) -> None:
    nothing = shutil.copytree(folders[0], tmp_path / "nothing")
    tensors = load_file(nothing / "model.safetensors")
    tensors["lm_head.weight"][3] = 1e38
    save_file(tensors, nothing / "model.safetensors", metadata={"format": "pt"})
    async with guarded(folders[0]) as (engine, guard):
        with pytest.raises(WeightError, match=r"cannot draw the canary: .*not finite"):
            await load(engine, guard, nothing, canaries[0], 1)
        assert guard.wrong
        assert guard.num_wrong == 1


async def test_what_a_version_drew_waits_until_it_has_passed(
    folders: tuple[Path, Path], canaries: tuple[Canary, Canary]
) -> None:
    """Whatever the engine serves at that time; what passed versions drew does not wait."""
    async with guarded(folders[0]) as (engine, guard):
        await load(engine, guard, folders[0], canaries[0], 1)
        with guard.expecting("canary:2:a", canaries[1]):
            assert not guard.is_open({"canary:0:a", "canary:1:a"})
            assert guard.is_open({"canary:1:a", "canary:2:a"}), "drawn, but not yet said to be served"
            await engine.load(folders[1], "canary:2:a")
        assert guard.is_open({"canary:2:a"})
        assert not guard.is_open({"canary:1:a"})
        with guard.expecting("canary:3:a", canaries[0]):
            await engine.load(folders[0], "canary:3:a")
        await guard.examine()
        assert not guard.is_open({"canary:3:a"})
        with pytest.raises(WeightError, match=r"canary:2:a drew some tokens, but never passed"):
            guard.is_open({"canary:2:a", "canary:3:a"})


async def test_weights_that_are_rounded_for_publication_pass(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The first version loses nothing by rounding, the second one does."""
    learner = learner_of(folders[0], tmp_path, weights__dtype="bfloat16")
    async with guarded(folders[0]) as (engine, guard):
        differences = []
        for seq, change in enumerate((lambda w: w.bfloat16(), lambda w: w * 1.003), start=1):
            with torch.no_grad():
                for weight in learner.model.parameters():
                    weight.copy_(change(weight))
            version = shutil.copytree(folders[0], tmp_path / str(seq))
            learner.write_weights(version)
            await load(engine, guard, version, canary_of(learner), seq)
            assert guard.last is not None
            differences.append(guard.last.mean)
        assert differences[1] > 100 * differences[0]
        assert guard.limit is None


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_canary_is_drawn_before_jobs_that_wait(deterministic: bool, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", endless=True)
    engine = TransformersEngine(folder, max_batch=2, threads=1, deterministic=deterministic, version="canary:0:a")
    await engine.start()
    ended = []

    async def draw(name: str, n: int, max_tokens: int) -> tuple[Sample, ...]:
        sampling = Sampling(max_tokens=max_tokens, seed=1)
        job = Job(job_id=name, run_id="canary", prompt_ids=[5, 6], n=n, sampling=sampling, sink=Sink.TRAIN)
        samples = await (engine.generate_first if name == "urgent" else engine.generate)(job)
        ended.append(name)
        return samples

    alone = await draw("begun", 4, 60)
    await idle(engine)
    with held(engine):
        jobs = [asyncio.create_task(draw("begun", 4, 60))]
        await until_async(lambda: engine.num_running == 2)
        jobs += [asyncio.create_task(draw("waits", 2, 60)), asyncio.create_task(draw("urgent", 1, 8))]
        await until_async(lambda: engine._worker is not None and engine._worker._commands.qsize() == 2)
    samples, *_ = await asyncio.gather(*jobs)
    order = ["begun", "urgent", "waits"] if deterministic else ["urgent", "begun", "waits"]
    assert ended[1:] == order
    assert samples == alone or not deterministic
    await engine.close()


async def test_weights_are_examined_now_and_then(folders: tuple[Path, Path], canaries: tuple[Canary, Canary]) -> None:
    async with guarded(folders[0]) as (engine, guard):
        await load(engine, guard, folders[0], canaries[0], 1)
        assert not guard.due
        guard._every_s = 0.0
        assert guard.due
        assert not guard.unproven
        await engine.load(folders[1], "canary:1:a")  # something overwrites the weights
        with pytest.raises(WeightError, match="does not compute"):
            await guard.examine()
        assert guard.unproven


async def test_a_context_that_is_too_short_for_the_canary_is_not_a_fault(
    folders: tuple[Path, Path], canaries: tuple[Canary, Canary], caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(folders[0]) as (engine, guard):
        engine.context_length = 8
        await load(engine, guard, folders[0], canaries[0], 1)
        assert "longer than this replica's context" in caplog.text


async def test_an_engine_of_ones_own_needs_nothing_for_its_canary(
    folders: tuple[Path, Path], canaries: tuple[Canary, Canary]
) -> None:
    """It has only what `Engine` asks for."""
    whole = TransformersEngine(folders[0], max_batch=16, threads=1, version="canary:0:a")
    engine = SimpleNamespace(**{name: getattr(whole, name) for name in (*ENGINE_ATTRIBUTES, *ENGINE_METHODS)})
    await engine.start()
    guard = Guard(engine, Metrics(), every_s=600.0)
    with guard.expecting("canary:1:a", canaries[0]):
        await engine.load(folders[0], "canary:1:a")
    engine.version = "canary:1:a"
    await guard.examine()
    assert not guard.unproven
    assert guard.last is not None
    await engine.close()


async def test_an_engine_that_draws_no_canaries_is_not_examined(
    folders: tuple[Path, Path], canaries: tuple[Canary, Canary]
) -> None:
    engine = FakeEngine(version="canary:0:a")
    guard = Guard(engine, Metrics(), every_s=600.0)
    await engine.start()
    with guard.expecting("canary:1:a", canaries[0]):
        await engine.load(folders[0], "canary:1:a")
    await guard.examine()
    assert not guard.due
    await engine.close()
