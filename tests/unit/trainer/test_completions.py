"""Completions that people see: which are picked, what is said about them, and where they appear."""

from __future__ import annotations

import io
import json
import math
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer as Core
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit
from transformers import PreTrainedTokenizerFast

from dvp_rl.engines.tokenizer import Tokenizer, load_tokenizer
from dvp_trainer.config import TrainSettings
from dvp_trainer.data.batch import Batch, ScoredGroup
from dvp_trainer.data.prompts import Row
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner
from dvp_trainer.report.completions import MAX_TOKENS, Completion, Fate, completions_table
from dvp_trainer.report.page import write_report
from dvp_trainer.report.pick import pick_completions
from dvp_trainer.report.sinks import CompletionsSink, OwnSink, PlainSink, ProgressSink, Reporter, Sink, read_records
from tests.kit.models import make_model
from tests.kit.records import make_sample, make_scored

TOKENS = ["a", " <b>", "\x1b[31m", "z"]
SHOWN = Completion(
    row=7,
    prompt="<user>say [bold]a",
    answer="a",
    reward=1.0,
    advantage=0.25,
    fate=Fate.TRAINED,
    weight=1.01,
    finish_reason="stop",
    num_tokens=4,
    num_skipped=0,
    tokens=TOKENS,
    kept_mass=[1.0, 0.995, 0.95, 0.5],
    infer_logprobs=[-0.1] * 4,
    train_logprobs=[-0.1, None, -0.1, -0.1],
)


# --- what is picked ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, seed=3)
    return folder


@pytest.fixture
def learner(folder: Path, tmp_path: Path) -> Learner:
    settings = TrainSettings(
        run_id="unit",
        out_dir=tmp_path,
        steps=1,
        model={"path": folder},
        data={"train": "unused.jsonl"},
        reward={"name": "exact_match"},
        sampling={"n": 2, "log_min_p": -2.0},
        correction={"veto": 0.9},
    )
    return Learner(load_model(settings.model), settings, pad_id=0)


def logits(learner: Learner, prompt: list[int]) -> torch.Tensor:
    """Of the token after the prompt, by a fresh copy of the model: that of a learner reads packed rows."""
    return load_model(learner.settings.model)(input_ids=torch.tensor([prompt])).logits[0, -1]


def likeliest(learner: Learner, prompt: list[int], length: int) -> list[int]:
    """Always inside the safe set."""
    tokens: list[int] = []
    for _ in range(length):
        tokens.append(int(logits(learner, prompt + tokens).argmax()))
    return tokens


def group(learner: Learner, position: int, off: tuple[float, float], rewards: tuple[float, float]) -> ScoredGroup:
    """Two samples of 3 tokens whose log-probs at the replica are the trainer's plus `off`; NaN: a token outside."""
    prompt = [5, 9, 11 + position]
    tokens = likeliest(learner, prompt, 3)
    exact = learner.look(Batch((make_scored(prompt, [make_sample(tokens, [0.0] * 3)], [0.0]),)).sequences())
    assert exact is not None
    logprobs = exact.train.logprobs[0].numpy()
    samples = []
    for shift in off:
        own = [*tokens[:2], int(logits(learner, [*prompt, *tokens[:2]]).argmin())] if math.isnan(shift) else tokens
        samples.append(make_sample(own, np.minimum(logprobs + np.nan_to_num(shift), 0)))
    return make_scored(prompt, samples, rewards, position=position)


def test_the_best_and_the_worst_of_each_group_with_their_fates(learner: Learner, folder: Path) -> None:
    groups = [
        group(learner, 0, (0.0, 0.0), (1.0, 0.0)),
        group(learner, 1, (0.75, math.nan), (0.0, 1.0)),
        group(learner, 2, (-1.0, 0.0), (1.0, 0.0)),
        group(learner, 3, (0.0, 0.0), (1.0, 1.0)),
    ]
    batch, rows = Batch(tuple(groups)), [Row(10 * i, "say it", str(i)) for i in range(4)]
    learner.step(batch)
    tokenizer = load_tokenizer(folder)
    seen = pick_completions(batch, learner, rows, tokenizer, count=100)
    told = [(one.row, one.answer, one.reward, one.advantage, one.fate) for one in seen]
    assert told == [
        (0, "0", 1.0, 1.0, Fate.TRAINED),
        (0, "0", 0.0, -1.0, Fate.TRAINED),
        (10, "1", 1.0, 1.0, Fate.OUTSIDE),
        (10, "1", 0.0, -1.0, Fate.RATIO),
        (20, "2", 1.0, 1.0, Fate.REJECTED),
        (20, "2", 0.0, -1.0, Fate.TRAINED),
        (30, "3", 1.0, 0.0, Fate.NO_SIGNAL),
    ]
    assert [one.weight for one in seen] == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, None]
    first, equal = seen[0], seen[-1]
    assert first.prompt == tokenizer.decode(groups[0].group.prompt_ids.tolist(), skip_special_tokens=False)
    assert first.text == tokenizer.decode(groups[0].group.samples[0].token_ids.tolist(), skip_special_tokens=False)
    assert first.train_logprobs == first.infer_logprobs
    assert equal.train_logprobs is None
    assert pick_completions(batch, learner, rows, tokenizer, count=3) == seen[:3]


def test_a_batch_without_any_signal_is_shown_too(learner: Learner, folder: Path) -> None:
    batch = Batch((group(learner, 0, (0.0, 0.0), (0.0, 0.0)),))
    learner.step(batch)
    (one,) = pick_completions(batch, learner, [Row(0, "say it")], load_tokenizer(folder), count=8)
    assert one.fate is Fate.NO_SIGNAL


def test_the_middle_of_a_long_completion_is_left_out(learner: Learner, folder: Path) -> None:
    long = [6] * MAX_TOKENS + [7] * 100
    sample = make_sample(long, [-0.5] * len(long))
    batch = Batch((make_scored([5], [sample, sample], [0.0, 0.0]),))
    learner.step(batch)
    (one,) = pick_completions(batch, learner, [Row(0, "say it")], load_tokenizer(folder), count=8)
    assert (one.num_tokens, one.num_skipped) == (MAX_TOKENS + 100, 100)
    assert len(one.tokens) == len(one.kept_mass) == len(one.infer_logprobs) == MAX_TOKENS
    assert one.text.count(" [... 100 tokens left out ...] ") == 1


# --- tokens -----------------------------------------------------------------------------------------------------------


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that a character may be several tokens."""
    letters = sorted(ByteLevelSplit.alphabet())
    core = Core(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = ByteLevelSplit(add_prefix_space=False), ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=letters[0])
    return Tokenizer(eos_ids=frozenset({0}), pad_id=0, vocab_size=len(letters), core=wrapped)


@pytest.mark.parametrize("text", ["plain", "äö 𝄞!", "", " two  spaces\n"])
def test_the_pieces_of_a_text_are_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    pieces = tokenizer.pieces(tokenizer.encode(text))
    assert "".join(pieces) == text
    assert len(pieces) == len(text.encode())
    assert all(pieces) == text.isascii()


def test_a_tokenizer_without_steps_decodes_each_token() -> None:
    tokenizer = byte_tokenizer()

    class Slow:
        """A tokenizer in Python: it has no `backend_tokenizer`."""

        decode = tokenizer.core.decode

    slow = Tokenizer(eos_ids=tokenizer.eos_ids, pad_id=0, vocab_size=256, core=Slow())
    assert slow.pieces(tokenizer.encode("a b")) == ["a", " ", "b"]


# --- where they appear ------------------------------------------------------------------------------------------------


def test_marks_grow_with_what_was_pruned() -> None:
    assert list(SHOWN.marked()) == list(zip(TOKENS, [0, 1, 2, 3], strict=True))


def test_the_file_is_private_and_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.touch(mode=0o644)
    for steps, resumed in [((1, 10, 20), None), ((20, 30), 10)]:
        sink = CompletionsSink(path, resumed_step=resumed, private=True)
        for step in steps:
            sink.show(step, [SHOWN])
        sink.close()
    records = read_records(path)
    assert [record["step"] for record in records] == [1, 10, 20, 30]
    assert Completion(**records[0]["completions"][0]) == SHOWN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_terminal_shows_a_table_that_no_completion_can_break() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="truecolor")
    sink = ProgressSink(20, console)
    sink.show(3, [SHOWN])
    sink.close()
    shown = console.file.getvalue()
    assert "step 3: best and worst completion" in shown
    assert "say [bold]a" in shown
    assert "0.25" in shown
    assert "\ufffd[31m" in shown
    plain = io.StringIO()
    Console(file=plain, width=120).print(completions_table(3, [SHOWN]))
    assert "\x1b" not in plain.getvalue()


def test_a_pipe_shows_none() -> None:
    console = Console(file=io.StringIO(), width=120)
    PlainSink(20, console).show(3, [SHOWN])
    assert console.file.getvalue() == ""


def test_long_texts_are_cut_on_a_terminal() -> None:
    long = Completion(**asdict(SHOWN) | {"prompt": "p" * 9000, "tokens": ["x" * 9000], "kept_mass": [1.0]})
    file = io.StringIO()
    Console(file=file, width=120).print(completions_table(3, [long] * 20))
    assert file.getvalue().count("trained") == 4
    assert len(file.getvalue()) < 20_000


def test_the_report_shows_the_first_and_the_last_record(tmp_path: Path) -> None:
    sink = CompletionsSink(tmp_path / "completions.jsonl")
    for step in (1, 10, 20):
        sink.show(step, [SHOWN])
    sink.close()
    write_report(tmp_path / "metrics.jsonl", {}, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert [f"<h3>Step {step}</h3>" in page for step in (1, 10, 20)] == [True, False, True]
    assert '<mark class="p1"> &lt;b&gt;</mark>' in page
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o600


def test_a_report_without_completions(tmp_path: Path) -> None:
    write_report(tmp_path / "metrics.jsonl", {}, tmp_path / "report.html")
    assert "Completions" not in (tmp_path / "report.html").read_text()


class Remembers(Sink):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def show(self, step: int, completions: Any) -> None:
        self.seen.append((step, completions))


@pytest.mark.parametrize("shows", [True, False])
def test_a_sink_of_ones_own_may_show_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shows: bool) -> None:
    show = "    def show(self, step, completions): self.file.write_text(str((step, completions[0].row)))\n" * shows
    (tmp_path / "own_sink_to_show.py").write_text(
        "class S:\n    def log(self, step, metrics): pass\n    def close(self): pass\n"
        + show
        + "def sink(out_dir, **_):\n    own = S()\n    own.file = out_dir / 'shown'\n    return own\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "own_sink_to_show", raising=False)
    remembers = Remembers()
    own = OwnSink("own_sink_to_show:sink", tmp_path, run_id="run", resumed_step=None)
    Reporter([own, remembers]).show(3, [SHOWN])
    assert remembers.seen == [(3, [SHOWN])]
    assert (tmp_path / "shown").exists() == shows


def test_every_value_is_json() -> None:
    assert Completion(**json.loads(json.dumps(asdict(SHOWN)))) == SHOWN
