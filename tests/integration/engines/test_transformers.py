"""Guarantees of the in-process engine alone: refused folders, one prefill per job, bit-equal deterministic mode."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dvp_rl.contract.errors import ConfigError, EngineError, RequestError, WeightError
from dvp_rl.contract.http import Message
from dvp_rl.engines.tokenizer import Tokenizer, load_tokenizer, template_variables
from dvp_rl.engines.transformers import TransformersEngine
from tests.chaos.troubles import no_files
from tests.kit.models import EOS_ID, PAD_ID, make_model
from tests.kit.wait import until_async

from .conftest import MakeEngine
from .jobs import held, make_job
from .oracle import Oracle


async def test_deterministic_mode_is_bit_equal_under_any_concurrency(
    folders: dict[str, Path], make_engine: MakeEngine
) -> None:
    jobs = [make_job(f"job{i}", list(range(5, 6 + 7 * i)), n=1 + 2 * i, log_min_p=-3.0) for i in range(5)]
    one_by_one = await make_engine(folders["qwen3"], deterministic=True, max_batch=4)
    expected = [await one_by_one.generate(job) for job in jobs]
    at_once = await make_engine(folders["qwen3"], deterministic=True, max_batch=4)
    for _ in range(2):
        reverse = await asyncio.gather(*(at_once.generate(job) for job in reversed(jobs)))
        assert reverse[::-1] == expected


async def test_deterministic_mode_swaps_between_jobs(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    engine = await make_engine(folders["even"], deterministic=True, max_batch=2)
    with held(engine):
        first = asyncio.create_task(engine.generate(make_job("first", n=5)))
        await until_async(lambda: engine.num_running == 2)
        second = asyncio.create_task(engine.generate(make_job("second", n=2)))
        load = asyncio.create_task(engine.load(folders["odd"], "run:1:odd"))
        await until_async(lambda: engine._worker is not None and engine._worker._commands.qsize() == 2)
    await load
    assert {span.version for sample in await first for span in sample.versions} == {"local:0:0"}
    assert {span.version for sample in await second for span in sample.versions} == {"run:1:odd"}


async def test_without_a_free_descriptor_weights_are_refused_by_name(
    folders: dict[str, Path], make_engine: MakeEngine
) -> None:
    engine = await make_engine(folders["even"])
    await engine.load(folders["odd"], "run:1:odd")  # imports the modules that reading needs
    with no_files(os.getpid()), pytest.raises(WeightError, match="Too many open files"):
        await engine.load(folders["even"], "run:2:even")
    await engine.load(folders["even"], "run:3:even")


async def test_samples_of_a_job_share_one_prefill(folders: dict[str, Path]) -> None:
    """One prefill serves all samples, even if they do not fit into the batch at once."""
    engine = TransformersEngine(folders["even"], threads=1, max_batch=4)
    await engine.start()
    prefills: list[tuple[int, ...]] = []

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            prefills.append(tuple(kwargs["input_ids"].shape))

    engine._model.register_forward_pre_hook(note, with_kwargs=True)
    await engine.generate(make_job("a", [5] * 20, n=11))
    assert prefills == [(1, 20)]
    await engine.close()


async def test_reading_weights_takes_no_more_threads_than_decoding(folders: dict[str, Path]) -> None:
    """Beside a busy trainer, a swap would have to wait for every additional thread."""
    before, counts = torch.get_num_threads(), set()

    def note(*_: Any) -> None:
        counts.add(torch.get_num_threads())

    engine = TransformersEngine(folders["even"], threads=before + 1)
    try:
        await engine.start()
        engine._model.register_forward_pre_hook(note)
        engine._model.register_state_dict_pre_hook(note)
        await engine.load(folders["odd"], "run:1:odd")
        await engine.generate(make_job())
        await engine.close()
    finally:
        torch.set_num_threads(before)
    assert counts == {before + 1}


async def test_a_failing_forward_fails_its_jobs_and_no_later_one(folders: dict[str, Path]) -> None:
    """The forward fails in prefill and in a decode step, as when the device runs out of memory."""
    engine = TransformersEngine(folders["even"], threads=1, max_batch=4)
    await engine.start()
    broken = [True]

    def fail(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if broken[0] and kwargs["input_ids"].shape[1] == width:
            raise RuntimeError("out of memory")

    engine._model.register_forward_pre_hook(fail, with_kwargs=True)
    for width in (20, 1):
        jobs = [engine.generate(make_job(f"{width}-{i}", [5] * 20, n=3)) for i in range(3)]
        for outcome in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert "out of memory" in str(outcome)
    broken[0] = False
    assert len(await engine.generate(make_job("next", n=3))) == 3
    await engine.close()


async def test_a_job_that_cannot_be_drawn_fails_alone(folders: dict[str, Path]) -> None:
    """Jobs in flight beside it are drawn again, one at a time; later jobs share a batch again."""
    engine = TransformersEngine(folders["even"], threads=1, max_batch=8)
    await engine.start()
    width = 33
    rows: list[int] = []
    failed_at: list[int] = []

    def fail(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        rows.append(len(kwargs["input_ids"]))
        if kwargs["input_ids"].shape[1] == width:
            failed_at.append(len(rows))
            raise RuntimeError("out of memory")

    engine._model.register_forward_pre_hook(fail, with_kwargs=True)
    for _ in range(2):
        failed_at.clear()
        with held(engine, rows=6):
            good = [asyncio.create_task(engine.generate(make_job(f"good-{i}", [5] * 20, n=3))) for i in range(2)]
            await until_async(lambda: engine.num_running == 6)
            poison = asyncio.create_task(engine.generate(make_job("poison", [5] * width, n=1)))
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="out of memory"):
            await poison
        assert [len(samples) for samples in await asyncio.gather(*good)] == [3, 3]
        assert max(rows[failed_at[0] :]) == 3
    await engine.close()


async def test_bfloat16_follows_the_float64_oracle_loosely(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    engine = await make_engine(folders["qwen3"], dtype="bfloat16")
    assert engine.facts.dtype == "bfloat16"
    job = make_job(n=4, log_min_p=-50.0, max_tokens=40)
    oracle = Oracle(folders["qwen3"])
    for sample in await engine.generate(job):
        expected = oracle.expect(job, sample.token_ids)
        assert abs(sample.logprobs - expected.logprobs).mean() < 0.1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "int8"}, "int8.*float32, bfloat16"),
        ({"device": "nowhere"}, "nowhere"),
        ({"max_batch": 0}, "max_batch 0"),
        ({"threads": 0}, "threads 0"),
        ({"max_context": 1}, "max_context 1.*2 to 1024"),
        ({"max_context": 4096}, "max_context 4096.*2 to 1024"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], named: str, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=named):
        TransformersEngine(folders["qwen3"], **settings)


def test_unknown_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        TransformersEngine(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"config\.json"):
        TransformersEngine(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(ConfigError, match="no-such-type"):
        TransformersEngine(tmp_path)


async def test_weights_stored_in_other_pieces_swap_too(tmp_path: Path, make_engine: MakeEngine) -> None:
    """A mixture of experts is saved expert by expert but held in one tensor."""
    old, new = (make_model(tmp_path / f"moe{seed}", "qwen3_moe", seed=seed) for seed in range(2))
    engine, fresh = await make_engine(old), await make_engine(new)
    job = make_job(n=2, temperature=0.0)
    before = await engine.generate(job)
    await engine.load(new, "run:1:new")
    after = await engine.generate(job)
    assert [s.token_ids.tolist() for s in after] == [s.token_ids.tolist() for s in await fresh.generate(job)]
    assert before[0].token_ids.tolist() != after[0].token_ids.tolist()


async def test_attention_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"softcap.*sglang"):
        await TransformersEngine(make_model(tmp_path / "gemma", "gemma2")).start()


def test_windows_shorter_than_the_context_are_refused(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    folder = make_model(tmp_path / "windows", "qwen2", **windows)
    with pytest.raises(ConfigError, match=r"sliding_attention.*max_context to 32.*sglang"):
        TransformersEngine(folder)
    assert TransformersEngine(folder, max_context=32).context_length == 32


async def test_a_window_that_never_closes_is_full_attention(tmp_path: Path, make_engine: MakeEngine) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    folder = make_model(tmp_path / "windows", "qwen2", **windows)
    engine = await make_engine(folder, max_context=32)
    job = make_job(n=3, max_tokens=28)
    Oracle(folder).check_all(job, await engine.generate(job))


async def test_start_refuses_folders_without_weights(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "empty")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        await TransformersEngine(folder).start()


async def test_tokenizer_without_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without end token"):
        await TransformersEngine(make_model(tmp_path / "endless", eos=False)).start()


def test_end_tokens_are_the_union_of_all_files(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == {EOS_ID, 7, 8}
    assert tokenizer.pad_id == PAD_ID
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder).eos_ids == {EOS_ID}


def test_chat(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_model(tmp_path / "chat"))
    messages = [Message(role="user", content="1+1="), Message(role="assistant", content="2")]
    ids = tokenizer.encode_chat(messages)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<user>1+1=<assistant>2<assistant>"
    assert tokenizer.decode(ids) == "1+1=2"
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(make_model(tmp_path / "plain", chat=False)).encode_chat(messages)


def test_arguments_of_the_chat_template(tmp_path: Path) -> None:
    """Transformers drops those that the template does not read, and takes those of its own names."""
    tokenizer = load_tokenizer(make_model(tmp_path / "chat"))
    messages = [Message(role="user", content="1+1=")]

    def rendered(tokenizer: Tokenizer, kwargs: dict[str, object] | None) -> str:
        return tokenizer.decode(tokenizer.encode_chat(messages, kwargs), skip_special_tokens=False)

    assert rendered(tokenizer, {"enable_thinking": False}) == "<user>1+1=<assistant>--"
    assert rendered(tokenizer, {"enable_thinking": True}) == "<user>1+1=<assistant>"
    own = replace(tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert rendered(own, None) == "<user>1+1=<assistant>--"
    assert rendered(own, {}) == "<user>1+1=<assistant>"
    for name, hint in (("enable_thinkin", "did you mean enable_thinking"), ("tokenize", "its arguments: enable_think")):
        with pytest.raises(RequestError, match=f"chat template has no argument '{name}'; {hint}") as caught:
            rendered(tokenizer, {name: False})
        assert caught.value.errors == [
            {"field": f"chat_template_kwargs.{name}", "value": False, "allowed": "enable_thinking"}
        ]


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("{% if date is not defined %}{% set date = strftime_now('%Y') %}{% endif %}{{ date }}", {"date"}),
        ("{% set thinks = thinks if thinks is defined else true %}{{ thinks }}", {"thinks"}),
        ("{% for i in range(3) %}{% break %}{% endfor %}{% set ns = namespace(x=1) %}{{ ns.x }}", set()),
        ("{%- generation -%}{{ messages }}{%+ endgeneration %}{{ raise_exception('no') }}", {"messages"}),
    ],
)
def test_variables_of_a_chat_template(template: str, read: set[str]) -> None:
    assert template_variables(template) == read


def test_text_round_trip(folders: dict[str, Path]) -> None:
    for family in ("llama", "qwen2", "qwen3"):
        tokenizer = load_tokenizer(folders[family])
        text = "12+30=42 Yes,\nno!"
        assert tokenizer.decode(tokenizer.encode(text)) == text
