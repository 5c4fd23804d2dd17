"""Computing in bfloat16 over float32 weights equals a model loaded in bfloat16, and agrees with a bfloat16 engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dvp_rl.contract.group import EngineFacts, Sample
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.contract.shape import Shape
from dvp_rl.engines.compute_dtype import compute_in, rounded
from dvp_rl.engines.transformers import TransformersEngine
from dvp_trainer.config import ModelSection
from dvp_trainer.data.batch import Episode
from dvp_trainer.learn.layout import Layout
from dvp_trainer.learn.micro_batch import MicroBatch, tokens_of
from dvp_trainer.learn.model import Policy, load_model
from dvp_trainer.queue.feeder import FROM_JOB, mismatches
from tests.kit.models import make_model
from tests.kit.records import make_sample, make_scored

LENGTH, LOG_MIN_P, PROMPT = 32, -6.0, [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_model(folder, vocab_size=512, layers=3, spread=4.0, tied=True, endless=True)


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model


def test_a_model_computes_as_one_loaded_in_that_dtype(folder: Path) -> None:
    """Forward and backward give the same bits, while weights and their gradients are float32."""
    low, master = load(folder, torch.bfloat16), load(folder, torch.float32)
    names = list(master.state_dict())
    compute_in(master, torch.bfloat16)
    token_ids = torch.arange(5, 25).view(2, 10)
    outputs = [model(input_ids=token_ids).logits for model in (low, master)]
    assert torch.equal(*outputs)
    for logits in outputs:
        logits.float().square().mean().backward()
    assert list(master.state_dict()) == names
    for (name, weight), other in zip(master.named_parameters(), low.parameters(), strict=True):
        assert weight.dtype == torch.float32
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32
        if "embed" not in name:  # tied: float32 adds the gradients of both ends without rounding
            assert torch.equal(weight.grad, other.grad.float()), name


def test_parameters_are_themselves_again_after_an_error(folder: Path) -> None:
    model = load(folder, torch.float32)
    compute_in(model, torch.bfloat16)
    with pytest.raises(RuntimeError):
        model.get_output_embeddings()(torch.ones(3))
    assert all(p.dtype == torch.float32 and p.is_leaf for p in model.parameters())
    assert {id(p) for p in model.get_output_embeddings().parameters()} <= {id(p) for p in model.parameters()}


def test_rounding_passes_the_gradient() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.equal(rounded(values, torch.bfloat16), values.bfloat16().float())
    rounded(values, torch.bfloat16).sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, torch.ones(1000))


def test_checkpointed_gradients_are_the_same_in_bfloat16(folder: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = load_model(ModelSection(path=folder, gradient_checkpointing=checkpointing))
        policy = make_policy(model, fp32_head=False)
        sample = make_sample([5, 9, 17, 30], [-1.0] * 4)
        policy.read(one_row(sample)).logprobs.sum().backward()
        gradients.append([p.grad.clone() for p in policy.parameters() if p.grad is not None])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def one_row(sample: Sample) -> MicroBatch:
    """The sample as an engine of fixed shape reads it, padded with zeros, so that both run the same kernels."""
    input_ids = np.zeros((1, LENGTH), np.int64)
    tokens = [*PROMPT, *sample.token_ids.tolist()]
    input_ids[0, : len(tokens)] = tokens
    before = torch.arange(len(PROMPT) - 1, len(tokens) - 1)
    layout = Layout(torch.from_numpy(input_ids), torch.arange(LENGTH)[None], None, before, None)
    episode = Episode(0, np.array(PROMPT), (sample,))
    return MicroBatch.collate([episode], [tokens_of(episode)], [layout])


def make_policy(model: PreTrainedModel, *, fp32_head: bool) -> Policy:
    policy = Policy(model, "bfloat16", log_min_p=LOG_MIN_P, temperature=1.0, fp32_head=fp32_head)
    model.set_attn_implementation("sdpa")
    return policy


@torch.no_grad()
def mismatch(folder: Path, samples: tuple[Sample, ...], *, fp32_head: bool) -> float:
    """Mean absolute difference of the log-probs, in nats."""
    policy = make_policy(load_model(ModelSection(path=folder)), fp32_head=fp32_head)
    gaps = []
    for sample in samples:
        own = policy.read(one_row(sample))
        gaps.append((own.logprobs - torch.tensor(sample.logprobs))[own.inside].abs())
    return float(torch.cat(gaps).mean())


async def test_a_float32_head_helps_on_both_sides_and_harms_on_one(folder: Path) -> None:
    found: dict[tuple[bool, bool], float] = {}
    for of_engine in (False, True):
        shape = Shape(1, LENGTH)
        engine = TransformersEngine(folder, dtype="bfloat16", threads=1, fixed_shape=shape, fp32_head=of_engine)
        await engine.start()
        assert engine.facts.fp32_head is of_engine
        sampling = Sampling(log_min_p=LOG_MIN_P, max_tokens=LENGTH - len(PROMPT), seed=1)
        job = Job(job_id="j", run_id="r", prompt_ids=np.array(PROMPT), n=4, sampling=sampling, sink=Sink.CLIENT)
        samples = await engine.generate(job)
        await engine.close()
        found |= {(of_engine, ours): mismatch(folder, samples, fp32_head=ours) for ours in (False, True)}
    assert found[True, True] < 1e-5
    assert found[False, False] < 3e-4, "few logits may round the other way"
    assert min(found[True, False], found[False, True]) > 1e-3


@pytest.mark.parametrize(
    ("engine", "model", "named"),
    [
        ({"dtype": "bfloat16", "fp32_head": True}, {"compute_dtype": "bfloat16"}, "is True, expected False"),
        ({"dtype": "bfloat16"}, {"compute_dtype": "bfloat16", "fp32_head": True}, "is False, expected True"),
        ({"dtype": "bfloat16"}, {"compute_dtype": "bfloat16"}, None),
        ({"dtype": "bfloat16", "fp32_head": True}, {"compute_dtype": "bfloat16", "fp32_head": True}, None),
        ({"dtype": "bfloat16", "fp32_head": True}, {"compute_dtype": "float32"}, None),
    ],
)
def test_a_group_with_the_head_of_the_other_kind_is_refused(
    folder: Path, engine: dict[str, Any], model: dict[str, Any], named: str | None
) -> None:
    group = make_scored(PROMPT, [make_sample([5], [-1.0])], [1.0]).group
    group = group.model_copy(update={"engine": EngineFacts(name="x", version="1", **engine)})
    fields = {name: getattr(group, name) for name in ("job_id", "run_id", "prompt_ids", "sampling", "sink")}
    job, section = Job(n=1, **fields), ModelSection(path=folder, **model)
    wrong = {} if named is None else {"engine.fp32_head": f"engine.fp32_head {named}"}
    assert mismatches(group, job, section) == wrong


def test_every_engine_of_a_group_is_looked_at(folder: Path) -> None:
    group = make_scored(PROMPT, [make_sample([5], [-1.0])], [1.0]).group
    half = EngineFacts(name="x", version="1", dtype="bfloat16")
    fields = {name: getattr(group, name) for name in ("job_id", "run_id", "prompt_ids", "sampling", "sink")}
    job, section = Job(n=1, **fields), ModelSection(path=folder, compute_dtype="bfloat16", fp32_head=True)
    assert mismatches(group, job, section) == {}
    assert mismatches(group.model_copy(update={"engines": (half,)}), job, section).keys() == {"engine.fp32_head"}


def test_a_group_of_episodes_answers_only_a_job_of_episodes(folder: Path) -> None:
    plain = make_scored(PROMPT, [make_sample([5], [-1.0])] * 2, [1.0, 0.0]).group
    fields = {name: getattr(plain, name) for name in ("job_id", "run_id", "sampling", "sink")}
    section = ModelSection(path=folder)
    asked, task = Job(n=2, prompt_ids=PROMPT, **fields), Job(n=2, prompt_ids=(), task={"prompt": "1+1"}, **fields)
    played = plain.model_copy(update={"rewards": (1.0, None), "task_digest": task.task_digest})
    assert mismatches(plain, asked, section) == mismatches(played, task, section) == {}
    for group, job in ((plain, task), (played, asked)):
        assert mismatches(group, job, section).keys() == {"rewards", "task"}


def test_episodes_of_another_task_are_refused(folder: Path) -> None:
    """As when a run with other data finds what an earlier one with its name had left in the queue."""
    group = make_scored(PROMPT, [make_sample([5], [-1.0])], [1.0]).group
    fields = {name: getattr(group, name) for name in ("job_id", "run_id", "sampling", "sink")}
    asked = Job(n=1, prompt_ids=(), task={"prompt": "1+1"}, **fields)
    played = group.model_copy(update={"rewards": (1.0,), "task_digest": asked.task_digest})
    for change in ({"task": {"prompt": "2+2"}}, {"chat_template_kwargs": {"enable_thinking": False}}):
        other = Job.model_validate(asked.model_dump() | change)
        assert mismatches(played, other, ModelSection(path=folder)).keys() == {"task"} <= FROM_JOB
