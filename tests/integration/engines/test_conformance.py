"""Requirements on every engine that runs a model.

Seeds are tested where they take effect: always with the transformers engine, but with SGLang only on a GPU under
--deterministic, as SGLang ignores seeds otherwise. Greedy samples reproduce everywhere.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from dvp_rl.contract.errors import EngineError, RequestError, UnavailableError, WeightError
from dvp_rl.contract.group import FinishReason, Sample
from dvp_rl.contract.job import Job
from dvp_rl.engines.protocol import Engine
from dvp_rl.engines.seeds import sample_seed
from dvp_rl.engines.tokenizer import load_tokenizer
from tests.kit.devices import DEVICES
from tests.kit.models import EOS_ID, FAMILIES, make_model

from .conftest import HEADS, MakeEngine
from .jobs import drawing, idle, make_job
from .oracle import Oracle

MIN_PS = (-13.0, -6.0, math.log(0.1))
TEMPERATURES = (0.7, 1.0, 1.3)
IN_PROCESS = ["transformers", "cuda"] if "cuda" in DEVICES else ["transformers"]
SERVERS = ["sglang", "vllm"]
# A server is restarted for each family: one is enough for CI.
ENGINES_AND_FAMILIES = [
    *((kind, family) for kind in IN_PROCESS for family in FAMILIES),
    *(pytest.param(kind, "qwen3", marks=pytest.mark.slow) for kind in SERVERS),
    *(pytest.param(kind, family, marks=pytest.mark.long) for kind in SERVERS for family in ("llama", "qwen2")),
]


@pytest.fixture(params=[*IN_PROCESS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SERVERS)])
def engine_kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def seeded(engine_kind: str) -> None:
    if engine_kind == "sglang":
        pytest.skip("SGLang honours seeds only with --deterministic, which needs a GPU")


@pytest.mark.parametrize(("engine_kind", "family"), ENGINES_AND_FAMILIES)
async def test_every_number_equals_the_float64_oracle(
    family: str, folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine
) -> None:
    """One batch mixes all settings, several prompt lengths and n = 3."""
    engine = await make_engine(folders[family])
    jobs = [
        make_job(f"job:{p}:{t}", list(range(5, 7 + i + j)), n=3, log_min_p=p, temperature=t)
        for i, p in enumerate(MIN_PS)
        for j, t in enumerate(TEMPERATURES)
    ]
    for job, samples in zip(jobs, await _all(engine, jobs), strict=True):
        oracles[family].check_all(job, samples)
        assert all(1 <= len(s.token_ids) <= 24 and s.versions[0].version == engine.version for s in samples)


@pytest.mark.parametrize(
    "engine_kind",
    [*IN_PROCESS, pytest.param("sglang", marks=pytest.mark.slow), pytest.param("vllm", marks=pytest.mark.long)],
)
async def test_first_tokens_follow_the_constrained_distribution(
    folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine
) -> None:
    """A chi-square test over 5,120 draws, which rejects the unpruned distribution and a temperature that is 5 % off."""
    engine = await make_engine(folders["qwen3"], max_batch=1024)
    jobs = [make_job(f"draw{i}", n=1024, max_tokens=1, log_min_p=-3.0, temperature=0.8) for i in range(5)]
    policy, kept_mass = oracles["qwen3"].policy(jobs[0])
    assert 0.70 <= kept_mass <= 0.95  # 5 to 30 % pruned
    counts = np.zeros(engine.vocab_size)
    for samples in await _all(engine, jobs):
        np.add.at(counts, np.concatenate([sample.token_ids for sample in samples]), 1)
    assert counts[policy == 0].sum() == 0
    unpruned = oracles["qwen3"].policy(make_job(log_min_p=-50.0, temperature=0.8))[0]
    warmer = oracles["qwen3"].policy(make_job(log_min_p=-3.0, temperature=0.84))[0]
    assert _chi_square(counts, policy) > 1e-4
    assert _chi_square(counts, unpruned) < 1e-4
    assert _chi_square(counts, warmer) < 1e-4


@pytest.mark.usefixtures("seeded")
async def test_seeds_reproduce(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    engine = await make_engine(folders["qwen3"])
    first, again, other, by_name = await _all(
        engine,
        [
            make_job("a", n=3, seed=7),
            make_job("b", n=3, seed=7),
            make_job("c", n=3, seed=8),
            make_job("d", n=3),
        ],
    )
    assert _tokens(first) == _tokens(again)
    assert len({tuple(ids) for group in (first, other, by_name) for ids in _tokens(group)}) == 9
    # Any sample can be drawn again alone from its own seed.
    (alone,) = await engine.generate(make_job("e", seed=first[2].seed))
    assert _tokens((alone,)) == _tokens(first[2:])


async def test_greedy_samples_reproduce(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    engine = await make_engine(folders["qwen3"])
    job = make_job("greedy", n=3, temperature=0.0)
    first, again = await engine.generate(job), await engine.generate(job)
    assert _tokens(first) == _tokens(again) == _tokens(first[:1]) * 3
    assert [sample.seed for sample in first] == [sample_seed(job, i) for i in range(3)]


async def test_end_tokens_and_stop_tokens(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    engine = await make_engine(folders["qwen3"])
    jobs = [make_job("eos", n=64, max_tokens=100), make_job("stops", n=64, max_tokens=100, stop_token_ids=(9, 20))]
    for stops, samples in zip(({EOS_ID}, {EOS_ID, 9, 20}), await _all(engine, jobs), strict=True):
        reasons = {sample.finish_reason for sample in samples}
        assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
        for sample in samples:
            hits = np.isin(sample.token_ids, list(stops))
            assert not hits[:-1].any()
            assert hits[-1] == (sample.finish_reason is FinishReason.STOP)
            assert len(sample.token_ids) == 100 or hits[-1]


async def test_stop_strings_keep_their_tokens(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    engine = await make_engine(folders["qwen3"])
    decode = load_tokenizer(folders["qwen3"]).decode
    (free,) = await engine.generate(make_job("free", temperature=0.0, max_tokens=40))
    text = decode(free.token_ids[5:8], skip_special_tokens=False)
    expected = next(t for t in range(41) if text in decode(free.token_ids[:t], skip_special_tokens=False))
    (stopped,) = await engine.generate(make_job("stopped", temperature=0.0, max_tokens=40, stop=("no such text", text)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids.tolist() == free.token_ids[:expected].tolist()


async def test_context_ends_a_sample(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    engine = await make_engine(folders["even"], max_context=1000)
    (full,) = await engine.generate(make_job("full", [5] * 997, max_tokens=100))
    (last,) = await engine.generate(make_job("last", [5] * 999, max_tokens=100))
    assert [len(s.token_ids) for s in (full, last)] == [3, 1]
    assert full.finish_reason is FinishReason.LENGTH


async def test_mixed_settings_share_a_batch(
    folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine
) -> None:
    """Rows differ in length, policy and end condition, and there are more samples than rows."""
    engine = await make_engine(folders["qwen3"], max_batch=7)
    jobs = [
        make_job("greedy", n=2, temperature=0.0, max_tokens=9),
        make_job("hot", [30], n=9, temperature=1.3, max_tokens=40),
        make_job("cold", [5, 60] * 20, n=3, temperature=0.7, log_min_p=-2.0, max_tokens=3),
        make_job("stop", [5, 60], n=3, stop=("7", "a"), stop_token_ids=(11,), max_tokens=60),
        make_job("one", list(range(5, 50)), n=1, log_min_p=-0.5, max_tokens=80),
    ]
    results = await _all(engine, jobs)
    for job, samples in zip(jobs, results, strict=True):
        oracles["qwen3"].check_all(job, samples)
    greedy = results[0]
    assert _tokens(greedy[:1]) == _tokens(greedy[1:])
    assert (greedy[0].logprobs == 0).all()
    assert (greedy[0].kept_mass == 1).all()


@pytest.mark.usefixtures("seeded")
async def test_neighbours_change_log_probs_by_rounding_only(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    engine = await make_engine(folders["qwen3"])
    jobs = [make_job(f"job{i}", list(range(5, 6 + i)), n=2, log_min_p=-3.0) for i in range(12)]
    together = await _all(engine, jobs)
    alone = [await engine.generate(job) for job in jobs]
    equal = 0
    for mine, theirs in zip(sum(together, ()), sum(alone, ()), strict=True):
        # A draw within rounding of a boundary may go either way, after which the samples differ. So may a token at the
        # edge of the kept set, which changes the kept mass.
        if mine.token_ids.tolist() == theirs.token_ids.tolist():
            equal += 1
            same_set = mine.kept_count == theirs.kept_count
            assert same_set.mean() >= 0.9
            np.testing.assert_allclose(mine.logprobs[same_set], theirs.logprobs[same_set], atol=1e-5)
    assert equal >= 22


@pytest.mark.parametrize("num_swaps", [1, 3])
async def test_swap_in_mid_generation(
    num_swaps: int, folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine
) -> None:
    """Each span equals a full forward under its own weights, so the cache was recomputed."""
    engine = await make_engine(folders["even"], max_batch=8, version="run:0:even")
    more = engine.capacity + 2
    jobs = [make_job(f"long{i}", list(range(5, 6 + i % 5)), n=2, max_tokens=600 + i % 5) for i in range(more // 2)]
    running = [asyncio.create_task(engine.generate(job)) for job in jobs]
    await drawing(engine)
    for seq in range(1, num_swaps + 1):
        name = ("even", "odd")[seq % 2]
        await engine.load(folders[name], f"run:{seq}:{name}")
        assert engine.version == f"run:{seq}:{name}"
        await drawing(engine)
    spans = []
    for job, samples in zip(jobs, await asyncio.gather(*running), strict=True):
        for sample in samples:
            spans.append([span.version for span in sample.versions])
            for span in sample.versions:
                checked = oracles[span.version.split(":")[2]].check(job, sample, span.start, span.end)
                assert checked >= 0.9 * (span.end - span.start) - 1
    everything = [f"run:{seq}:{('even', 'odd')[seq % 2]}" for seq in range(num_swaps + 1)]
    # Two samples wait for a row. An engine that queues them ahead of interrupted ones makes two others wait.
    assert all(versions == sorted(versions) and versions[-1] == everything[-1] for versions in spans)
    assert sum(versions[0] == everything[0] for versions in spans) == engine.capacity
    assert spans.count(everything) >= engine.capacity - 2 * (num_swaps - 1)


def _truncate(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    return "model.safetensors"


def _scramble_header(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)
    return "model.safetensors"


def _reshape(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(weights, folder / "model.safetensors")
    return r"up_proj.*\[3, 5\]"


def _omit(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    return r"model\.norm\.weight"


def _add(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    weights["model.layers.2.extra"] = torch.zeros(1)
    save_file(weights, folder / "model.safetensors")
    return r"model\.layers\.2\.extra"


def _integers(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")
    return r"lm_head.*int8"


def _not_finite(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    weights["lm_head.weight"][3, 4] = float("nan")
    save_file(weights, folder / "model.safetensors")
    return r"lm_head.*NaN"


def _remove(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    (folder / "model.safetensors").unlink()
    return "safetensors"


@pytest.mark.parametrize(
    "damage", [_truncate, _scramble_header, _reshape, _omit, _add, _integers, _not_finite, _remove]
)
async def test_unfit_weights_are_refused_and_the_old_serve_on(
    damage: Callable[[Path, dict[str, torch.Tensor]], str],
    tmp_path: Path,
    folders: dict[str, Path],
    make_engine: MakeEngine,
) -> None:
    engine = await make_engine(folders["qwen3"])
    job = make_job(temperature=0.0)
    before = await engine.generate(job)
    broken = make_model(tmp_path / "broken", "qwen3", seed=5, **HEADS)
    named = damage(broken, load_file(broken / "model.safetensors"))
    with pytest.raises(WeightError, match=named):
        await engine.load(broken, "run:1:broken")
    assert engine.version == "local:0:0"
    assert _tokens(await engine.generate(job)) == _tokens(before)


async def test_cancelling_frees_the_rows(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    engine = await make_engine(folders["even"], max_batch=6)
    doomed = asyncio.create_task(engine.generate(make_job("doomed", n=8 * engine.capacity, max_tokens=1000)))
    await drawing(engine)
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    await idle(engine)
    assert len(await engine.generate(make_job("next", n=3))) == 3


@pytest.mark.parametrize(
    ("prompt", "allowed"), [([5] * 1024, "at most 1023"), ([5, 96], "0 to 95"), ([2**31 - 1], "0 to 95")]
)
async def test_jobs_that_do_not_fit_are_refused(
    prompt: list[int], allowed: str, folders: dict[str, Path], make_engine: MakeEngine
) -> None:
    engine = await make_engine(folders["qwen3"])
    with pytest.raises(RequestError, match=allowed) as caught:
        await engine.generate(make_job(prompt=prompt))
    assert caught.value.errors[0]["field"] == "prompt_ids"


async def test_close_fails_what_is_in_flight(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    """There are jobs enough for capacity to be in use whenever a slow machine looks."""
    engine = await make_engine(folders["even"], max_batch=4)
    n = engine.capacity // 2 + 1
    jobs = [make_job(f"r{i}", n=n, max_tokens=1000) for i in range(16)]
    running = [asyncio.create_task(engine.generate(job)) for job in jobs]
    await drawing(engine)
    unfinished = [task for task in running if not task.done()]
    await engine.close()
    assert unfinished
    for outcome in await asyncio.gather(*unfinished, return_exceptions=True):
        assert isinstance(outcome, EngineError)
    with pytest.raises(UnavailableError):
        await engine.generate(make_job())


async def test_nan_logits_fail_only_their_job(tmp_path: Path, make_engine: MakeEngine) -> None:
    """Token 50 has a NaN embedding and the logit 0, far below the threshold, so it is never drawn. A job with it in the
    prompt fails; its neighbours and the jobs that take over its rows do not."""
    folder = make_model(tmp_path / "nan", "qwen3", spread=2.0, context=1024, **HEADS)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][50] = float("nan")
    weights["lm_head.weight"][50] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = await make_engine(folder, max_batch=8)
    sane = [make_job(f"sane{i}", n=2, log_min_p=-1.0, max_tokens=60, seed=i) for i in range(4)]
    sick = [make_job(f"sick{i}", [5] * (1 + 30 * i) + [50], n=2) for i in range(3)]
    outcomes = await asyncio.gather(
        *(engine.generate(job) for job in [*sane[:2], *sick, *sane[2:]]), return_exceptions=True
    )
    for failure in outcomes[2:5]:
        assert isinstance(failure, EngineError)
    assert "sick0" in str(outcomes[2])
    assert "position 2" in str(outcomes[2])
    oracle = Oracle(folder)
    for job, samples in zip(sane, outcomes[:2] + outcomes[5:], strict=True):
        assert not isinstance(samples, BaseException)
        oracle.check_all(job, samples)


@pytest.mark.parametrize(("engine_kind", "family"), ENGINES_AND_FAMILIES)
async def test_tied_weights_swap(family: str, tmp_path: Path, make_engine: MakeEngine) -> None:
    old = make_model(tmp_path / "old", family, tied=True, seed=1, context=1024, **HEADS)
    new = make_model(tmp_path / "new", family, tied=True, seed=2, context=1024, **HEADS)
    engine = await make_engine(old)
    await engine.load(new, "run:1:new")
    job = make_job(n=2)
    Oracle(new).check_all(job, await engine.generate(job))


async def _all(engine: Engine, jobs: list[Job]) -> list[tuple[Sample, ...]]:
    return list(await asyncio.gather(*(engine.generate(job) for job in jobs)))


def _tokens(samples: tuple[Sample, ...]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


def _chi_square(counts: np.ndarray, policy: np.ndarray) -> float:
    """The p-value, with cells pooled to an expected count of 5, from the least to the most likely."""
    order = np.argsort(policy)
    expected, seen = [0.0], [0.0]
    for count, mean in zip(counts[order], policy[order] * counts.sum(), strict=True):
        if expected[-1] >= 5:
            expected.append(0.0)
            seen.append(0.0)
        expected[-1] += mean
        seen[-1] += count
    return float(stats.chisquare(seen, np.array(expected) * (sum(seen) / sum(expected))).pvalue)
