"""The folder that `dvp-train export` writes: the same model for Transformers and PEFT, and every way to refuse."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.http import RolloutRequest
from dvp_rl.dvp.policy import constrained_logprobs
from dvp_rl.engines.reference import EAGER, attending
from dvp_trainer.config import ExportSettings, TrainSettings
from dvp_trainer.export import export
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner
from dvp_trainer.report.starts import describe_start, read_starts, write_start
from dvp_trainer.resume.checkpoint import Checkpoints, Progress
from tests.kit.models import make_model
from tests.unit.trainer.golden import make_batch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
IDS = torch.arange(2, 14).view(2, 6)
LOG_MIN_P = -2.0
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '\\n' }}{% endfor %}{{ mood }}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder that samples in its own way, with a licence, a hidden file, and the manifest of a version."""
    folder = make_model(tmp_path / "model", spread=2.0, tied=True)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.6, "top_k": 20}')
    for name in ("LICENSE", "README.md", ".hidden", "dvp-manifest.json"):
        (folder / name).write_text("the model's own")
    return folder


def train(
    model: Path,
    out: Path,
    *,
    rank: int = 0,
    scores: bool = True,
    log_min_p: float = -13.0,
    chat: Mapping[str, object] | None = None,
    sampling: Mapping[str, object] | None = None,
) -> dict[int, Tensor]:
    """A run with checkpoints of steps 1, 2 and 3, the best of which is 2; the logits of each. `chat`: settings of the
    data, TEMPLATE among them."""
    settings = TrainSettings.model_validate(
        {
            "run_id": "mine",
            "out_dir": out,
            "steps": 3,
            "model": {"path": model},
            "lora": {"rank": rank},
            "data": {"train": "d.jsonl", **(chat or {})},
            "reward": {"name": "exact_match"},
            "sampling": {"n": 4, "log_min_p": log_min_p, **(sampling or {})},
            "correction": {"veto": None, "mode": "unit"},
            "optimizer": {"lr": 0.01},
        }
    )
    learner = Learner(load_model(settings.model), settings, pad_id=0)
    checkpoints = Checkpoints(out / "checkpoints", keep=3)
    checkpoints.claim(1)
    template = TEMPLATE if settings.data.chat_template else None
    start = describe_start(settings, step=0, model=learner.base_digest, machine={}, chat_template=template)
    write_start(start, settings, out)
    logits, rng = {}, np.random.default_rng(0)
    for step in (1, 2, 3):
        learner.step(make_batch(rng))
        best = (min(step, 2), 0.5) if scores else None
        checkpoints.save(Progress(step=step, samples=8 * step, best=best), learner.save)
        with attending(learner.model, EAGER):  # plain, not packed
            logits[step] = logits_of(learner.model)
    (out / "metrics.jsonl").write_text('{"step": 2, "heldout/score": 0.5}\n')
    return logits


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    found: Tensor = model.eval()(input_ids=IDS).logits.float()
    return found


def run_export(out: Path, to: Path, **options: str) -> list[str]:
    return export(
        ExportSettings.load([str(out), f"--to={to}", *(f"--{name}={text}" for name, text in options.items())])
    )


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)


@pytest.mark.parametrize("rank", [0, 4])
def test_transformers_loads_the_model_of_the_checkpoint(tmp_path: Path, model: Path, rank: int) -> None:
    logits = train(model, tmp_path / "run", rank=rank)
    for which, step in (("best", 2), ("last", 3), ("1", 1)):
        (line, *_) = run_export(tmp_path / "run", tmp_path / which, step=which)
        assert f"whole model in float32, 0.3 MB: mine at step {step}" in line
        torch.testing.assert_close(logits_of(load(tmp_path / which)), logits[step], rtol=0, atol=1e-5)
    assert (logits[2] - logits[3]).abs().max() > 1e-3


def test_the_card_says_what_changed_on_the_way(tmp_path: Path, model: Path) -> None:
    """The model has moved since the first start."""
    out = tmp_path / "run"
    train(model, out)
    (start,) = read_starts(out)
    with (out / "starts.jsonl").open("w") as file:
        for step, changed in (
            (0, {"model": {"path": "gone"}}),
            (2, {"optimizer": {"lr": 0.02}}),
            (3, {"optimizer": {"lr": 0.03}}),
        ):
            file.write(
                start.model_copy(update={"step": step, "settings": start.settings | changed}).model_dump_json() + "\n"
            )
    for which, text in (("2", "`0.01`"), ("last", "`0.01`, from step 2 `0.02`")):
        run_export(out, tmp_path / which, step=which)
        assert f"| `optimizer.lr` | {text} |" in (tmp_path / which / "README.md").read_text()


def test_without_scores_the_best_is_the_newest(tmp_path: Path, model: Path) -> None:
    train(model, tmp_path / "run", scores=False)
    assert "mine at step 3" in run_export(tmp_path / "run", tmp_path / "to")[0]


def test_a_lower_dtype_rounds_the_weights_and_says_so(tmp_path: Path, model: Path) -> None:
    train(model, tmp_path / "run")
    run_export(tmp_path / "run", tmp_path / "float32")
    run_export(tmp_path / "run", tmp_path / "bfloat16", dtype="bfloat16")
    exact, rounded = (load(tmp_path / dtype).state_dict() for dtype in ("float32", "bfloat16"))
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in exact.items())


def test_by_default_the_dtype_is_that_of_the_first_model(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    train(model, tmp_path / "run")
    assert "whole model in bfloat16" in run_export(tmp_path / "run", tmp_path / "to")[0]
    assert load(tmp_path / "to").dtype is torch.bfloat16


def test_peft_loads_the_adapter(tmp_path: Path, model: Path) -> None:
    logits = train(model, tmp_path / "run", rank=4)
    run_export(tmp_path / "run", tmp_path / "adapter", form="adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    adapted = PeftModel.from_pretrained(load(model), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(adapted), logits[2], rtol=0, atol=1e-5)
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(named) == model


def test_the_folder_is_complete(tmp_path: Path, model: Path) -> None:
    train(model, tmp_path / "run")
    run_export(tmp_path / "run", tmp_path / "to")
    assert {path.name for path in (tmp_path / "to").iterdir()} == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("model.safetensors", "LICENSE", "README.md"),
    }
    assert (tmp_path / "to" / "LICENSE").read_text() == "the model's own"
    card = (tmp_path / "to" / "README.md").read_text()
    assert "| Run | `mine`, step 2, 16 samples |" in card
    assert "| Held-out score | 0.5000 |" in card
    assert AutoTokenizer.from_pretrained(tmp_path / "to").eos_token_id is not None


def test_it_samples_from_the_policy_that_was_trained(tmp_path: Path, model: Path) -> None:
    train(model, tmp_path / "run", log_min_p=LOG_MIN_P)
    run_export(tmp_path / "run", tmp_path / "to")
    torch.manual_seed(0)
    exported = load(tmp_path / "to")
    prompts = torch.arange(2, 34).view(-1, 1).repeat_interleave(32, 0)
    drawn = exported.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=1)[:, 1]
    with torch.no_grad():
        logits = exported(input_ids=prompts).logits[:, -1]
    inside = constrained_logprobs(logits, drawn, log_min_p=LOG_MIN_P, temperature=1.0).inside
    assert inside.all()
    likely = logits >= logits.amax(1, keepdim=True) + LOG_MIN_P
    assert 1 < likely.sum(1).double().mean() < logits.shape[1] / 2, "pruning must matter, and leave a choice"
    assert len(set(zip(prompts[:, 0].tolist(), drawn.tolist(), strict=True))) > len(set(prompts[:, 0].tolist()))


@pytest.mark.parametrize("rank", [0, 4])
def test_the_code_on_the_card_runs(tmp_path: Path, model: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = train(model, tmp_path / "run", rank=rank)
    run_export(tmp_path / "run", tmp_path / "to", form="adapter" if rank else "merged")
    monkeypatch.chdir(tmp_path / "to")
    (code,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    torch.testing.assert_close(logits_of(names["model"]), logits[2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_card_shows_how_prompts_were_rendered(
    tmp_path: Path, model: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = {"chat_template": "t.jinja", "system_prompt": "add?\n", "chat_template_kwargs": {"mood": "glad"}}
    train(model, tmp_path / "run", rank=rank, chat=chat)
    run_export(tmp_path / "run", tmp_path / "to", form="adapter" if rank else "merged")
    monkeypatch.chdir(tmp_path / "to")
    card = Path("README.md").read_text()
    loading, rendering = re.findall(r"^`{3,4}python\n(.*?)^`", card, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(loading + rendering.replace("\ntokenizer", "\nids = tokenizer"), names)
    shown = names["tokenizer"].decode(names["ids"]["input_ids"])
    assert shown == "system add?\n\nuser ...\nglad"
    assert ('`"chat_template_kwargs": {"mood": "glad"}`' in card) is not bool(rank), "an adapter names no servers"


def test_it_prints_a_request_with_a_prompt_like_those_of_the_run(tmp_path: Path, model: Path) -> None:
    def requested(
        folder: str, *, roles: tuple[str, ...] | None, **options: Mapping[str, object]
    ) -> RolloutRequest | None:
        out, to = tmp_path / folder, tmp_path / f"{folder}-exported"
        train(model, out, **options)
        (start,) = read_starts(out)
        (out / "starts.jsonl").write_text(start.model_copy(update={"roles": roles}).model_dump_json() + "\n")
        *_, ask, _ = run_export(out, to)
        told, _, command = ask.partition(" curl ")
        card = (to / "README.md").read_text(encoding="utf-8")
        if told != "  ask   ":
            assert "curl" not in card
            return None
        assert f"curl {command}" in card.splitlines()
        return RolloutRequest.model_validate_json(shlex.split(command)[-1])

    plain = requested("plain", roles=(), sampling={"stop": ["9", "it's"], "max_tokens": 7})
    assert plain is not None
    assert plain.sampling is not None
    assert plain.prompt == "..."
    assert (plain.sampling.temperature, plain.sampling.max_tokens, plain.sampling.stop) == (0, 7, ("9", "it's"))
    assert requested("unknown", roles=None) is None

    own = {"system_prompt": "it’s", "chat_template_kwargs": {"mood": "glad"}}
    for folder, roles, chat, contents in (
        ("few-shot", ("user", "assistant", "user"), {}, ["...", "...", "..."]),
        ("own", ("system", "user"), own, ["it’s", "..."]),
        ("old", None, own, ["it’s", "..."]),
    ):
        asked = requested(folder, roles=roles, chat=chat)
        assert asked is not None
        assert asked.messages is not None
        assert [message.content for message in asked.messages] == contents
        assert [message.role for message in asked.messages] == list(roles or ("system", "user"))
        assert asked.chat_template_kwargs == chat.get("chat_template_kwargs", {})


def test_what_cannot_be_exported_is_refused(tmp_path: Path, model: Path) -> None:
    run, to = tmp_path / "run", tmp_path / "to"
    with pytest.raises(ConfigError, match=r"is not the out_dir of a run"):
        run_export(run, to)
    train(model, run)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7; there are \[1, 2, 3\]"):
        run_export(run, to, step="7")
    with pytest.raises(ConfigError, match=r"this run trained the weights themselves"):
        run_export(run, to, form="adapter")
    with pytest.raises(ConfigError, match=r"is not an empty folder"):
        run_export(run, model)
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    with pytest.raises(ConfigError, match=r"the run started from a folder of digest .* --model"):
        run_export(run, to)
    (run / "checkpoints" / "step-00000002" / "progress.json").unlink()
    with pytest.raises(ConfigError, match=r"unreadable checkpoint"):
        run_export(run, to)
    assert not to.exists()
    assert not list(tmp_path.glob(".to*"))


def test_an_empty_folder_is_filled_where_it_is(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = train(model, tmp_path / "run")
    empty, link = tmp_path / "empty", tmp_path / "link"
    empty.mkdir()
    link.symlink_to(empty)
    inode = empty.stat().st_ino
    monkeypatch.chdir(empty)
    run_export(tmp_path / "run", Path("."))
    assert empty.stat().st_ino == inode, "it may be somebody's working directory, or a mount point"
    torch.testing.assert_close(logits_of(load(link)), logits[2], rtol=0, atol=1e-5)
    assert not list(empty.glob(".*"))
    with pytest.raises(ConfigError, match=r"is not an empty folder"):
        run_export(tmp_path / "run", link)


def test_a_checkpoint_that_goes_while_it_is_read_is_named(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(model, tmp_path / "run")

    def swept(state: Path, _: object) -> None:
        shutil.rmtree(state.parent)
        raise FileNotFoundError(state)

    monkeypatch.setattr("dvp_trainer.export.load_weights", swept)
    with pytest.raises(ConfigError, match=r"step-00000002 was replaced by newer checkpoints .* export again"):
        run_export(tmp_path / "run", tmp_path / "to")


def test_a_disk_that_is_full_leaves_nothing_behind(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(model, tmp_path / "run")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dvp_trainer.export.write_weights", full)
    with pytest.raises(ConfigError, match=r"to = .* could not be written .*No space left"):
        run_export(tmp_path / "run", tmp_path / "to")
    assert [path.name for path in tmp_path.glob("*to*")] == []


def test_a_model_that_moved_is_named(tmp_path: Path, model: Path) -> None:
    logits = train(model, tmp_path / "run")
    moved = model.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"which is not there; name its place with --model"):
        run_export(tmp_path / "run", tmp_path / "to")
    run_export(tmp_path / "run", tmp_path / "to", model=str(moved))
    moved.rename(model)
    torch.testing.assert_close(logits_of(load(tmp_path / "to")), logits[2], rtol=0, atol=1e-5)
