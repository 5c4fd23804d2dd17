"""Completions that people see: which are picked, what is said about them, and where they appear."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import stat
from collections.abc import Callable
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

from dvp_rl.contract.completions import ENVIRONMENT, MAX_TOKENS, Completion, Fate, completion_lines, read_completions
from dvp_rl.contract.group import FinishReason
from dvp_rl.engines.tokenizer import Tokenizer, load_tokenizer
from dvp_trainer.config import ReportSection, TrainSettings
from dvp_trainer.data.batch import Batch, ScoredGroup
from dvp_trainer.data.prompts import Row
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner
from dvp_trainer.options import Overlong
from dvp_trainer.report.page import write_report
from dvp_trainer.report.pick import pick_completions
from dvp_trainer.report.sinks import CompletionsSink, OwnSink, PlainSink, ProgressSink, Reporter, Sink
from dvp_trainer.report.terminal import TERMINAL_CHARACTERS, TERMINAL_LINES, completions_table
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
def make_learner(folder: Path, tmp_path: Path) -> Callable[..., Learner]:
    def make(**changes: dict[str, Any]) -> Learner:
        values: dict[str, Any] = {
            "model": {"path": folder},
            "data": {"train": "unused.jsonl"},
            "reward": {"name": "exact_match"},
            "sampling": {"n": 2, "log_min_p": -2.0},
            "correction": {"veto": 0.9},
        }
        sections = {name: values.get(name, {}) | changes.get(name, {}) for name in {**values, **changes}}
        settings = TrainSettings(run_id="unit", out_dir=tmp_path, steps=1, **sections)
        return Learner(load_model(settings.model), settings, pad_id=0)

    return make


@pytest.fixture
def learner(make_learner: Callable[..., Learner]) -> Learner:
    return make_learner()


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
    exact = learner.look(Batch((make_scored(prompt, [make_sample(tokens, [0.0] * 3)], [0.0]),)).episodes())
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
    seen = pick_completions(batch, learner, rows, tokenizer, updated=True)
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
    learner.settings = learner.settings.model_copy(update={"report": ReportSection(completions=3)})
    assert pick_completions(batch, learner, rows, tokenizer, updated=True) == seen[:3]


def fates(learner: Learner, folder: Path, batch: Batch) -> list[Fate]:
    updated = learner.step(batch)["optimizer/updates"] > 0
    rows = [Row(i, "say it") for i in range(len(batch.groups))]
    return [one.fate for one in pick_completions(batch, learner, rows, load_tokenizer(folder), updated=updated)]


@pytest.mark.parametrize("overlong", list(Overlong))
def test_what_was_cut_off_and_left_out(make_learner: Callable[..., Learner], folder: Path, overlong: Overlong) -> None:
    learner = make_learner(reward={"overlong": overlong})
    whole = group(learner, 0, (0.0, 0.0), (1.0, 0.0))
    cut = [sample.model_copy(update={"finish_reason": FinishReason.LENGTH}) for sample in whole.group.samples]
    samples = (whole.group.samples[0], cut[1])
    scored = dataclasses.replace(whole, group=whole.group.model_copy(update={"samples": samples}))
    left_out = overlong in (Overlong.MASK, Overlong.DROP)
    assert fates(learner, folder, Batch((scored,))) == [Fate.TRAINED, Fate.TOO_LONG if left_out else Fate.TRAINED]


def test_a_batch_without_a_step(learner: Learner, folder: Path) -> None:
    batch = Batch((group(learner, 0, (0.0, 0.0), (1.0, 0.0)),))
    next(learner.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
    assert fates(learner, folder, batch) == [Fate.NO_STEP] * 2


def test_the_users_objective_decides_by_itself(
    make_learner: Callable[..., Learner], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "objective_to_show.py").write_text("def all_tokens(train_logprobs, *_): return -train_logprobs.sum()")
    monkeypatch.syspath_prepend(str(tmp_path))
    learner = make_learner(correction={"objective": "objective_to_show:all_tokens"})
    assert fates(learner, folder, Batch((group(learner, 0, (-1.0, 0.0), (1.0, 0.0)),))) == [Fate.OWN] * 2


def test_a_later_update_decides_by_its_own_weights(make_learner: Callable[..., Learner], folder: Path) -> None:
    learner = make_learner(batch={"updates": 2, "groups": 2}, optimizer={"lr": 1e-1})
    groups = [group(learner, position, (0.0, 0.0), (1.0, 0.0)) for position in (0, 1)]
    first, second = [fates(learner, folder, Batch(tuple(groups)))[i : i + 2] for i in (0, 2)]
    assert first == [Fate.TRAINED] * 2
    assert learner.update_evidence is not None
    kept = learner.correct(learner.update_evidence).kept_sequences[2:].tolist()
    assert [fate is Fate.TRAINED for fate in second] == kept
    assert not all(kept), "the first update has moved the weights far"


def test_a_batch_without_any_signal_is_shown_too(learner: Learner, folder: Path) -> None:
    batch = Batch((group(learner, 0, (0.0, 0.0), (0.0, 0.0)),))
    learner.step(batch)
    (one,) = pick_completions(batch, learner, [Row(0, "say it")], load_tokenizer(folder), updated=False)
    assert one.fate is Fate.NO_SIGNAL


def test_the_middle_of_a_long_completion_is_left_out(learner: Learner, folder: Path) -> None:
    long = [6] * MAX_TOKENS + [7] * 100
    sample = make_sample(long, [-0.5] * len(long))
    batch = Batch((make_scored([5], [sample, sample], [0.0, 0.0]),))
    learner.step(batch)
    (one,) = pick_completions(batch, learner, [Row(0, "say it")], load_tokenizer(folder), updated=False)
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


def test_a_mark_within_a_character_is_shown_with_it() -> None:
    halves = dataclasses.replace(SHOWN, tokens=["", "é", "a"], kept_mass=[0.9, 1.0, 1.0])
    assert list(halves.marked()) == [("é", 3), ("a", 0)]


GIVEN = dataclasses.replace(SHOWN, kept_mass=[1.0, None, None, 0.5], num_environment=2, num_forks=1)
"""Two of its tokens came from the environment."""


def test_text_of_the_environment_has_a_mark_of_its_own(tmp_path: Path) -> None:
    assert list(GIVEN.pieces()) == [("a", 0), (" <b>\x1b[31m", ENVIRONMENT), ("z", 3)]
    begun = dataclasses.replace(SHOWN, tokens=["", "é", "a"], kept_mass=[None, 0.5, 1.0])
    assert list(begun.marked()) == [("é", 3), ("a", 0)]
    assert "dim: the environment's" in " ".join(on_terminal([GIVEN]).split())
    assert "environment" not in on_terminal([SHOWN])
    for shown, count in ((GIVEN, 1), (SHOWN, 0)):
        sink = CompletionsSink(tmp_path / "completions.jsonl", resumed_step=None)
        sink.log_completions(1, [shown])
        sink.close()
        write_report(tmp_path / "metrics.jsonl", {}, tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert page.count('<span class="environment"> &lt;b&gt;') == count
        assert page.count("given by the environment") == page.count("<dt>of the environment</dt><dd>2</dd>") == count


def test_a_record_of_before_there_were_environments_is_read() -> None:
    new = {"num_environment", "num_forks"}
    fields = {name: value for name, value in dataclasses.asdict(SHOWN).items() if name not in new}
    assert read_completions(json.dumps({"step": 1, "completions": [fields]}).encode()) == [SHOWN]


def write(path: Path, *steps: int, resumed_step: int | None = None) -> None:
    sink = CompletionsSink(path, resumed_step=resumed_step)
    for step in steps:
        sink.log_completions(step, [SHOWN])
    sink.close()


def test_the_file_is_private_and_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.touch(mode=0o644)
    write(path, 1, 10, 20)
    write(path, 20, 30, resumed_step=10)
    assert [step for step, _ in completion_lines(path)] == [1, 10, 20, 30]
    assert all(read_completions(line) == [SHOWN] for _, line in completion_lines(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_run_that_shows_none_leaves_no_old_ones(tmp_path: Path) -> None:
    write(tmp_path / "completions.jsonl", 99)
    write(tmp_path / "completions.jsonl")
    assert (tmp_path / "completions.jsonl").read_text() == ""


@pytest.mark.parametrize("damage", [b"{}\n", b"\xff\n", b'{"step": 3, "compl', b'{"step": 3, "completions": [}\n'])
def test_a_damaged_line_ends_neither_a_resume_nor_a_report(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "completions.jsonl"
    write(path, 1, 2)
    path.write_bytes(path.read_bytes() + damage)
    write_report(tmp_path / "metrics.jsonl", {}, tmp_path / "report.html")
    write(path, 3, resumed_step=2)
    assert [step for step, _ in completion_lines(path)] == [1, 2, 3]


def test_records_of_another_version_are_left_out(tmp_path: Path) -> None:
    line = b'{"step": 3, "completions": [{"prompt": "1+1=", "colour": "red"}]}\n'
    (tmp_path / "completions.jsonl").write_bytes(line)
    assert read_completions(line) == []
    write_report(tmp_path / "metrics.jsonl", {}, tmp_path / "report.html")


class Terminal(io.TextIOWrapper):
    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode(self.encoding)


def on_terminal(completions: list[Completion], width: int = 120, encoding: str = "utf-8") -> str:
    terminal = Terminal(encoding)
    sink = ProgressSink(20, Console(file=terminal, width=width, force_terminal=True, color_system="truecolor"))
    sink.log_completions(3, completions)
    sink.close()
    return terminal.shown()


def test_a_terminal_shows_a_table_that_no_completion_can_break() -> None:
    shown = on_terminal([SHOWN])
    assert "step 3: best and worst completion" in shown
    assert "say [bold]a" in shown
    assert "0.25" in shown
    assert "\ufffd[31m" in shown


@pytest.mark.parametrize("width", [40, 120])
def test_a_terminal_shows_a_prompt_once_and_on_few_lines(width: int) -> None:
    chat = dataclasses.replace(SHOWN, prompt="<user>\nadd\n<assistant>\n")
    file = io.StringIO()
    Console(file=file, width=width).print(completions_table(3, [chat, chat, SHOWN], width=width))
    lines = [line.strip("│ ") for line in file.getvalue().splitlines()]
    assert sum("<user>↵add↵<assistant>↵" in line for line in lines) == 1
    assert any("say [bold]a" in line for line in lines)
    assert all(lines)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_a_terminal_of_any_encoding_shows_any_text(encoding: str) -> None:
    quoted = dataclasses.replace(SHOWN, prompt="“4” …" * 200, tokens=["“4”", " 𝄞", "é", "\x85"])
    assert "reward" in on_terminal([quoted], encoding=encoding)


@pytest.mark.parametrize("width", [20, 44, 79, 80, 120])
def test_a_table_fits_any_terminal(width: int) -> None:
    long = dataclasses.replace(SHOWN, prompt="one two\n" * 900, tokens=["x\n"] * 900, kept_mass=[1.0] * 900)
    wordy = dataclasses.replace(SHOWN, prompt="word " * 900, tokens=[" word"] * 900, kept_mass=[1.0] * 900)
    file = io.StringIO()
    Console(file=file, width=width).print(completions_table(3, [long, wordy] * 10, width=width))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 20 + 4 * 2 * (TERMINAL_CHARACTERS // (width // 3) + 2 * TERMINAL_LINES)
    assert file.getvalue().count("trained") == 4


@pytest.mark.parametrize("sink", [PlainSink, ProgressSink])
def test_what_is_no_terminal_shows_none(sink: type[PlainSink | ProgressSink]) -> None:
    """With FORCE_COLOR rich takes any log for a terminal."""
    file = io.StringIO()
    opened = sink(20, Console(file=file, width=120, force_terminal=True))
    opened.log_completions(3, [SHOWN])
    opened.close()
    assert "say" not in file.getvalue()


def test_the_report_shows_the_first_and_the_last_record(tmp_path: Path) -> None:
    write(tmp_path / "completions.jsonl", 1, 10, 20)
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

    def log_completions(self, step: int, completions: Any) -> None:
        self.seen.append((step, completions))


@pytest.mark.parametrize("shows", [True, False])
def test_a_sink_of_ones_own_may_show_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shows: bool) -> None:
    show = (
        "    def log_completions(self, step, completions): self.file.write_text(str((step, completions[0].row)))\n"
        * shows
    )
    (tmp_path / "own_sink_to_show.py").write_text(
        "class S:\n    def log(self, step, metrics): pass\n    def close(self): pass\n"
        + show
        + "def sink(out_dir, **_):\n    own = S()\n    own.file = out_dir / 'shown'\n    return own\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "own_sink_to_show", raising=False)
    remembers = Remembers()
    own = OwnSink("own_sink_to_show:sink", tmp_path, run_id="run", resumed_step=None)
    Reporter([own, remembers]).log_completions(3, [SHOWN])
    assert remembers.seen == [(3, [SHOWN])]
    assert (tmp_path / "shown").exists() == shows


def test_every_value_is_json() -> None:
    assert Completion(**json.loads(json.dumps(asdict(SHOWN)))) == SHOWN
