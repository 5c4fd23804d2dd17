"""Engines of a study on a real model: the tokens they draw and the logits they return."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dvp_lab.engines import Engine
from dvp_lab.mismatch import EDGES, measure
from dvp_lab.overlap import RULES, overlap
from dvp_lab.page import write_page
from dvp_lab.precision import Format, multiplies_fp8, rounded
from dvp_lab.rho import FIXED, MATCHED, SLOPES, rho
from dvp_lab.rules import NOTHING_PRUNED, Rule
from dvp_lab.signature import signature
from dvp_lab.sources import CPU, Trainer, opened, traces, until_end
from dvp_lab.study import Study
from dvp_lab.subject import Subject, file_subject
from dvp_rl.contract.errors import ConfigError
from dvp_rl.dvp.policy import constrained_logprobs
from tests.kit.models import EOS_ID, make_model

EVERY = len(EDGES) - 1
HERE = [engine for engine in Engine if not engine.is_sglang and (engine is not Engine.FP8 or multiplies_fp8(CPU))]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    torch.set_num_threads(1)
    folder = make_model(tmp_path_factory.mktemp("lab") / "model", "qwen3", spread=2.0, context=64)
    prompts = torch.randint(5, 90, (6, 5), generator=torch.Generator().manual_seed(0))
    return Subject(folder, torch.split(prompts, 4), "a model of random weights")


@pytest.mark.parametrize("engine", HERE)
@pytest.mark.parametrize("rule", [NOTHING_PRUNED, Rule(-2.0), Rule(-1.0, 0.5)], ids=lambda rule: rule.label)
def test_an_engine_draws_from_the_logits_it_shows(subject: Subject, engine: Engine, rule: Rule) -> None:
    with opened(engine, subject.folder) as source:
        token_ids, mask, logprobs, logits = source.sample(subject.prompts[0], rule, 12, seed=3)
        again = source.sample(subject.prompts[0], rule, 12, seed=3)
        other = source.sample(subject.prompts[0], rule, 12, seed=4)
    assert logits is not None
    shown = constrained_logprobs(logits, token_ids, log_min_p=rule(logits), temperature=1.0)
    assert shown.inside.all()
    torch.testing.assert_close(shown.logprobs, logprobs)
    assert torch.equal(mask, until_end(token_ids, torch.tensor([EOS_ID])))
    assert torch.equal(again.token_ids, token_ids)
    assert not torch.equal(other.token_ids, token_ids)


def test_in_float32_there_is_next_to_no_mismatch_and_in_low_precision_there_is(subject: Subject) -> None:
    trainer, s = Trainer(subject.folder), {}
    for engine in HERE:
        with opened(engine, subject.folder) as source:
            found = measure(traces(source, trainer, subject.prompts, NOTHING_PRUNED, 12, seed=0))
        s[engine] = found.s
        assert found.bucket(0, EVERY).beyond_exact == 0
        assert all(bucket.is_ordered for _, bucket in found.buckets())
    assert s[Engine.FP32] < 1e-5
    assert min(s[engine] for engine in HERE if engine is not Engine.FP32) > 1e-3


def test_signature_of_several_engines(subject: Subject, tmp_path: Path) -> None:
    said = []
    study = signature(
        subject, HERE[-2:], 8, seed=0, progress=lambda done, total, what: said.append((done, total, what))
    )
    assert said == [(0, 2, "transformers-fp8-kv"), (1, 2, "gaussian")]
    assert [finding.holds for finding in study.findings[:3]] == [True, None, True], "bounds and order"
    write_page(Study.load(study.save(tmp_path)), tmp_path)
    tables = json.loads((tmp_path / "signature.json").read_text())["tables"]
    assert [row[0] for row in tables[0]["rows"]] == HERE[-2:]
    assert [row[-1] for row in tables[0]["rows"]] == [0, 0], "tokens beyond the exact range"
    assert "transformers-fp8-kv: a token's probability is typically off by" in study.conclusion[1], (
        "the control is no engine"
    )


def test_engines_without_mismatch_and_the_control_alone_have_a_page(subject: Subject, tmp_path: Path) -> None:
    for engine, said in ((Engine.FP32, ["No engine here differs"]), (Engine.GAUSSIAN, [])):
        study = signature(subject, [engine], 4, seed=0, progress=lambda *_: None)
        assert [sentence[:22] for sentence in study.conclusion] == said
        assert write_page(Study.load(study.save(tmp_path)), tmp_path).is_file()


def test_logits_that_are_not_finite_are_refused(subject: Subject) -> None:
    class Broken(Trainer):
        def logits(self, prompts: Tensor, token_ids: Tensor) -> Tensor:
            found = super().logits(prompts, token_ids).clone()
            found[-1, -1, 3] = math.nan
            return found

    with (
        opened(Engine.FP32, subject.folder) as source,
        pytest.raises(ConfigError, match="the trainer: some logits are not finite"),
    ):
        list(traces(source, Broken(subject.folder), subject.prompts, NOTHING_PRUNED, 1, seed=0))


def test_overlap_of_several_engines(subject: Subject) -> None:
    said: list[str] = []
    study = overlap(
        subject, [Engine.BF16, Engine.FP8_KV], 8, seed=0, progress=lambda done, total, what: said.append(what)
    )
    assert [what for what in said if "," not in what] == [Engine.BF16, Engine.FP8_KV]
    assert [row[0] for row in study.tables[0].rows] == [rule.label for rule in RULES]
    assert study.findings[0].holds
    assert "rho = e⁻¹³" in study.conclusion[1]
    assert "rho = e⁻²" in study.conclusion[2]


def test_the_cpu_named_is_the_default(subject: Subject, tmp_path: Path) -> None:
    for study in (signature, overlap):
        default, named = (
            study(subject, [Engine.BF16, Engine.GAUSSIAN], 8, seed=0, progress=lambda *_: None, **options)
            for options in ({}, {"device": torch.device("cpu")})
        )
        assert default.save(tmp_path / "default").read_bytes() == named.save(tmp_path / "named").read_bytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_float32_agrees_with_the_trainer_on_the_cpu_and_low_precision_does_not(subject: Subject) -> None:
    """Float32 logits agree within 1e-4 nats, some 20 times the rounding of logits of this size. The control's noise
    is that of the CPU."""
    cuda = torch.device("cuda")
    trainers, s = [Trainer(subject.folder, device) for device in (CPU, cuda)], {}
    engines = [
        engine for engine in Engine if not engine.is_sglang and (engine is not Engine.FP8 or multiplies_fp8(cuda))
    ]
    for engine in engines:
        with opened(engine, subject.folder, cuda) as source:
            samples = source.sample(subject.prompts[0], NOTHING_PRUNED, 12, seed=3)
            s[engine] = measure(traces(source, trainers[1], subject.prompts, NOTHING_PRUNED, 12, seed=0)).s
        assert samples.logits is not None
        on_cpu, on_gpu = (trainer.logits(subject.prompts[0], samples.token_ids) for trainer in trainers)
        torch.testing.assert_close(on_gpu, on_cpu, atol=1e-4, rtol=0)
        if engine is Engine.FP32:
            torch.testing.assert_close(samples.logits, on_cpu, atol=1e-4, rtol=0)
        if engine is Engine.GAUSSIAN:
            with opened(engine, subject.folder) as here:
                logits = here.sample(subject.prompts[0], NOTHING_PRUNED, 12, seed=3).logits
            assert logits is not None
            torch.testing.assert_close(samples.logits[:, 0], logits[:, 0], atol=1e-4, rtol=0)
    assert s[Engine.FP32] < 1e-5
    assert min(s[engine] for engine in engines if engine is not Engine.FP32) > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_study_says_which_gpu_it_ran_on(subject: Subject) -> None:
    for study in (signature, overlap):
        found = study(subject, [Engine.BF16], 8, seed=0, progress=lambda *_: None, device=torch.device("cuda"))
        said = found.settings["trainer and transformers engines"]
        assert torch.cuda.get_device_name() in said
        assert torch.__version__ in said


def test_rho_of_an_engine(subject: Subject) -> None:
    study = rho(subject, Engine.FP8_WEIGHTS, 6, seed=0, budget=None, progress=lambda *_: None)
    rows = {row[0]: row for row in study.tables[0].rows}
    assert set(rows) >= {rule.label for rule in FIXED}
    assert len(rows) == len(FIXED) + len(MATCHED) * len(SLOPES)
    pruned = [rows[rule.label][1] for rule in FIXED]
    assert pruned == sorted(pruned, reverse=True)
    fixed = [rule.label for rule in FIXED if rule.prunes]
    assert any(f"Proposed: rho = {label}. " in study.findings[0].statement for label in fixed)
    assert any(study.conclusion[0].startswith(f"Use rho = {label}: ") for label in fixed)
    assert "reward" not in study.tables[0].columns
    assert not any("another model" in words for words in (study.abstract, *study.notes)), "nothing was trained"


@pytest.mark.slow
def test_signature_of_a_real_sglang(subject: Subject) -> None:
    """In float32, its log-probs of the whole vocabulary are the trainer's, and its min-p prunes as the rule does."""
    trainer = Trainer(subject.folder)
    with opened(Engine.SGLANG_FP32, subject.folder) as source:
        found = measure(traces(source, trainer, subject.prompts, NOTHING_PRUNED, 12, seed=0))
        pruned = source.sample(subject.prompts[0], rule := Rule(-2.0), 12, seed=0)
        with pytest.raises(ConfigError, match="min-p per request"):
            source.sample(subject.prompts[0], Rule(-2.0, 0.5), 12, seed=0)
    assert found.num_tokens > 30
    assert found.s < 1e-5
    assert found.bucket(0, EVERY).beyond_exact == 0
    logits = trainer.logits(subject.prompts[0], pruned.token_ids)
    own = constrained_logprobs(logits, pruned.token_ids, log_min_p=rule(logits), temperature=1.0)
    assert own.inside[pruned.mask].all()
    torch.testing.assert_close(own.logprobs[pruned.mask], pruned.logprobs[pruned.mask], atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    ("format", "step"),
    [(Format.BFLOAT16, 2**-8), (Format.FP8, 2**-4), (Format.INT8, 0.5 / 127), (Format.INT4, 0.5 / 7)],
)
def test_rounding_is_to_the_nearest(format: Format, step: float) -> None:
    """The error is at most half a step: relative to the value for floats, to the row's largest value for integers."""
    torch.manual_seed(0)
    values = torch.randn(5, 64)
    values[0] = 0.0
    found = rounded(values, format)
    largest = values.abs().amax(-1, keepdim=True)
    is_float = format in (Format.BFLOAT16, Format.FP8)
    allowed = values.abs() * step + largest * 2**-15 if is_float else largest * step * 1.001
    assert ((found - values).abs() <= allowed).all()
    assert not torch.equal(found, values)
    torch.testing.assert_close(rounded(found, format), found)


def test_prompts_of_a_file_come_in_blocks_of_one_length(subject: Subject, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    texts = [f"{'9' * (1 + i % 3)}+1=" for i in range(50)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    found = file_subject(subject.folder, file, 40, seed=0)
    assert found.num_prompts == 40
    assert all(len(block) <= 16 for block in found.prompts)
    assert {block.shape[1] for block in found.prompts} == {4, 5, 6}


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read"), ('{"text": 1}\n', "line 1 is not a JSON")])
def test_what_is_no_file_of_prompts_is_said(subject: Subject, tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        file_subject(subject.folder, file, 4, seed=0)
