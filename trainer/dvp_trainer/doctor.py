"""`dvp-train doctor CONFIG`: what would stop a run, and what its prompts look like, before it starts.

It goes through the parts of a run's start (setup.py) one by one. Where one fails it says so and goes on, so that all
mistakes show at once. It loads no weights, changes nothing at the broker, and leaves no file but that of a failed
reward.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from math import prod
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from dvp_rl.contract.errors import ConfigError, DvpError, NoBrokerError, RequestError
from dvp_rl.contract.http import ReplicaHealth, Verdict
from dvp_rl.contract.openai import ChatRequest
from dvp_rl.contract.weights import INITIAL_SEQ, WeightVersion
from dvp_rl.engines.chat import Chat
from dvp_rl.engines.context import model_context
from dvp_rl.engines.tokenizer import Tokenizer, load_config
from dvp_rl.settings import masked
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.health import Snapshot, judge, take_snapshot
from dvp_rl.transport.lease import check_untrained
from dvp_rl.transport.roles import Role
from dvp_rl.weights.folder import folder_digest

from .config import TrainSettings
from .data.prompts import Prompts, Row
from .data.rendering import (
    compare_data,
    encode_prompt,
    holds_chats,
    longest_sequence,
    open_heldout,
    open_tokenizer,
    open_training,
    task_of,
)
from .learn.weight_files import INDEX
from .patience import patient
from .report.starts import read_starts
from .report.terminal import CONTROLS
from .resume.checkpoint import Checkpoints
from .setup import check_device, check_hooks, check_resumable, scoring
from .up.harness import try_environment
from .up.replica import flags, options_of_replica

SHOWN_ROWS = 2
MEASURED_ROWS = 1000
MAX_CHARACTERS = 2000
"""Longest rendered prompt that is shown in full."""
STATE_BYTES = 12
"""Bytes of a parameter in a checkpoint: the weight and AdamW's two moments in float32."""
UP_BRINGS = "`dvp-train up` starts one, and replicas"
EXPECTED = {Verdict.NO_REPLICAS, Verdict.NO_TRAINER, Verdict.IDLE}
"""Verdicts that say nothing new before a run starts."""


class Mark(StrEnum):
    OK = "ok"
    NOTE = "note"
    """The run starts, but perhaps not as meant."""
    SKIPPED = "skip"
    """Not looked at, because of an earlier failure."""
    FAILED = "FAIL"
    """The run would stop."""


class Finding(NamedTuple):
    mark: Mark
    part: str
    text: str

    def __str__(self) -> str:
        first, *more = self.text.translate(CONTROLS).split("\n")
        return "\n".join([f"{self.mark:<5}{self.part:<13}{first}", *(f"{'':18}{line}" for line in more)])


class Note(str):
    """A finding to act upon, although the run starts."""


class SkippedError(Exception):
    """A part cannot be looked at without what an earlier one failed to find."""


def examine(settings: TrainSettings) -> Iterator[Finding | str]:
    """Findings as they are made, then advice. Raises ConfigError if one of them would stop the run."""
    yield Finding(Mark.OK, "run", _described(settings))
    examination, failed = Examination(settings), []
    for part, look in examination.parts().items():
        for finding in _looked(part, look):
            if finding.mark is Mark.FAILED:
                failed.append(part)
            yield finding
    if failed:
        raise ConfigError(f"the run would stop at {', '.join(failed)}")
    yield "Nothing that would stop the run was found. `dvp-train check` also loads the weights and tries the model."


def _described(settings: TrainSettings) -> str:
    batch, n = settings.batch.groups, settings.sampling.n
    return f"{settings.run_id}: {settings.steps} steps of {batch} prompts with {n} samples each"


def _looked(part: str, look: Callable[[], Iterable[str]]) -> Iterator[Finding]:
    """Findings of a part of the start: what it logs, what it says, and how it fails."""
    said: list[Finding] = []
    with _heard() as records, _patient(part):
        try:
            said += (Finding(Mark.NOTE if isinstance(text, Note) else Mark.OK, part, text) for text in look())
        except SkippedError as error:
            said.append(Finding(Mark.SKIPPED, part, str(error)))
        except (DvpError, OSError) as error:
            said.append(Finding(Mark.FAILED, part, str(error)))
    for record in records:
        mark = Mark.OK if record.levelno < logging.WARNING else Mark.NOTE
        trace = "" if record.exc_info is None else "\n" + logging.Formatter().formatException(record.exc_info)
        yield Finding(mark, part, f"{record.getMessage()}{trace}")
    yield from said


class Examination:
    """The parts of a run's start, each with what earlier ones have found."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.tokenizer: Tokenizer | None = None
        self.train: Prompts | None = None
        self.heldout: Prompts | None = None
        self.num_parameters: int | None = None
        self.snapshot: Snapshot | None = None

    def parts(self) -> dict[str, Callable[[], Iterable[str]]]:
        """What to look at, in order."""
        heldout = {} if self.settings.data.heldout is None else {"data.heldout": self.look_at_heldout}
        asked = {"prompts": self.look_at_prompts}
        if self.settings.episodes.harness:  # it writes the prompts
            asked = {} if self.settings.up.environment is None else {"environment": self.look_at_environment}
        return {
            "hooks": self.look_at_hooks,
            "device": self.look_at_device,
            "tokenizer": self.look_at_tokenizer,
            "model": self.look_at_model,
            "data.train": self.look_at_train,
            **asked,
            **heldout,
            "reward": self.look_at_reward,
            "out_dir": self.look_at_out_dir,
            "broker": self.look_at_broker,
            "replicas": self.look_at_replicas,
        }

    def look_at_hooks(self) -> Iterable[str]:
        self.settings.weights.read_token()
        check_hooks(self.settings)
        return ()

    def look_at_device(self) -> Iterator[str]:
        device = self.settings.model.device
        check_device(device)
        yield device if not device.startswith("cuda") else f"{device}, {torch.cuda.get_device_name(device)}"

    def look_at_tokenizer(self) -> Iterator[str]:
        self.tokenizer = open_tokenizer(self.settings)
        template = self.settings.data.chat_template or ("no" if self.tokenizer.chat_template is None else "the model's")
        yield f"{self.tokenizer.vocab_size:,} tokens, {template} chat template"

    def look_at_model(self) -> Iterator[str]:
        folder = self.settings.model.path
        config = load_config(folder)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(f"model folder {folder}: model type {config.model_type} is not a causal LM")
        self.num_parameters = count_parameters(folder)
        context = model_context(config)
        length = "of a length that config.json does not name" if context is None else f"of {context:,} tokens"
        yield f"{config.model_type}, {self.num_parameters / 1e6:,.1f} M parameters, context {length}"

    def look_at_train(self) -> Iterator[str]:
        self.train = open_training(self.settings, self._tokenizer)
        yield _columns(self.train)

    def look_at_heldout(self) -> Iterator[str]:
        self.heldout = open_heldout(self.settings, self._tokenizer)
        assert self.heldout is not None, "this part is there only if it is set"
        if self.train is not None:
            compare_data(self.train, self.heldout, self.settings.evaluate.limit)
        yield _columns(self.heldout)

    def look_at_prompts(self) -> Iterator[str]:
        rows, tokenizer = self._train.first(MEASURED_ROWS), self._tokenizer
        encoded = [encode_prompt(tokenizer, row, self._train.source).tolist() for row in rows]
        lengths = sorted(map(len, encoded))
        measured = f"the first {len(rows):,}" if len(rows) < len(self._train) else f"all {len(rows):,}"
        yield f"{lengths[0]:,} to {lengths[-1]:,} tokens, median {median(lengths):,.0f}, of {measured}"
        yield from self._answers(rows)
        yield from self._room(lengths)
        yield from self._arguments()
        for row, ids in zip(rows[:SHOWN_ROWS], encoded, strict=False):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            yield f"row {row.index}, {len(ids)} tokens, answer {_answer(row)}:\n{_shortened(text)}"

    def _answers(self, rows: Sequence[Row]) -> Iterator[str]:
        """Compares the answers' lengths with that of a completion, which is an answer and an end token at least."""
        encode = self._tokenizer.encode
        more = 1 - len(encode(""))  # the end token, less those that begin a text of its own
        lengths = sorted(len(encode(row.answer)) + more for row in rows if row.answer)
        if not lengths:
            return
        limit = self.settings.sampling.max_tokens
        long = sum(length > limit for length in lengths)
        text = f"answers of {lengths[0]:,} to {lengths[-1]:,} tokens, the end token counted"
        text += f"; sampling.max_tokens = {limit:,}"
        yield Note(f"{text}: {long:,} are longer and would be cut off") if long else text

    def _room(self, lengths: list[int]) -> Iterator[str]:
        context, limit = longest_sequence(self.settings), self.settings.sampling.max_tokens
        cut = sum(context is not None and length + limit > context for length in lengths)
        if cut:
            yield Note(
                f"{cut:,} of them leave less room than sampling.max_tokens = {limit:,} in the context of {context:,}: "
                "their completions are cut off earlier"
            )

    def _arguments(self) -> Iterator[str]:
        """Arguments of the chat template that are left to it."""
        template = self._tokenizer.chat_template
        if template is None or not holds_chats(self._train):
            return
        try:
            arguments = self._tokenizer.template_arguments(template)
        except (TemplateError, RecursionError):  # it renders, which is enough for a run without arguments
            return
        if unset := [name for name in arguments if name not in self.settings.data.chat_template_kwargs]:
            yield f"the chat template also takes {', '.join(unset)}: data.chat_template_kwargs sets them"

    def look_at_environment(self) -> Iterator[str]:
        settings, tokenizer, (row,) = self.settings, self._tokenizer, self._train.first(1)
        said, chat = try_environment(settings, task_of(row, self._train.source)), Chat(tokenizer)
        if not said["requests"]:
            yield f"{settings.up.environment}, an agent: only a model can try it"
            return
        first, *second = [ChatRequest.model_validate(request) for request in said["requests"]]
        tools, kwargs = first.tools or (), settings.data.chat_template_kwargs
        try:
            text, *_ = [chat.render(request.messages, tools, kwargs) for request in (first, *second)]
        except RequestError as error:
            raise ConfigError(f"the replicas would refuse row {row.index}: {error}") from None
        num, context = len(tokenizer.encode_rest(text)), longest_sequence(settings)
        yield f"{settings.up.environment}, tools: {', '.join(tool.function.name for tool in tools) or 'none'}"
        if context is not None and num >= context:
            yield Note(f"row {row.index} fills the context of {context:,} tokens: its episodes cannot be played")
        yield f"row {row.index}, {num:,} tokens:\n{_shortened(text)}"
        reward, then = said["step"]["reward"], "ends" if said["step"]["done"] else "goes on"
        given = "no reward" if reward is None else f"reward {reward:g}"
        yield f"the answer {said['answer'][:MAX_CHARACTERS]!r} gets {given}, and the episode {then}"
        if said["close_error"]:
            yield Note(said["close_error"])

    def look_at_reward(self) -> Iterable[str]:
        async def tried() -> None:
            async with scoring(self.settings, self._tokenizer, self._train, self.heldout, trains=True):
                pass

        asyncio.run(tried())
        return ()

    def look_at_out_dir(self) -> Iterator[str]:
        out, root = self.settings.out_dir, self.settings.out_dir / "checkpoints"
        place = _writable("out_dir", root)
        _writable("weights.folder", self.settings.weights_folder / self.settings.run_id)
        read_starts(out)
        checkpoints = Checkpoints(root, keep=1, create=False)
        steps, planned = checkpoints.steps() if root.is_dir() else [], self.settings.steps
        if not steps:
            yield f"{out}: no checkpoint in it, the run begins at step 0"
        else:
            if self.train is not None:
                check_resumable(self.settings, checkpoints.progress(steps[-1]), self.train)
            if steps[-1] < planned:
                yield f"{out}: the run resumes after step {steps[-1]} of {planned}"
            else:
                yield Note(f"{out}: {steps[-1]} of {planned} steps are done; to train on, raise steps")
        yield from self._space(place)

    def _space(self, place: Path) -> Iterator[str]:
        """Compares what the run keeps at a time with what is free: checkpoints (the newest, the best, and the one being
        written) and published versions. Adapters are too small to matter."""
        settings, num = self.settings, self.num_parameters
        if num is None or settings.lora.rank:
            return
        per_weight = 2 if settings.weights.dtype == "bfloat16" else 4
        need = num * (STATE_BYTES * (settings.checkpoint.keep + 2) + per_weight * (settings.weights.keep_last + 2))
        free = shutil.disk_usage(place).free
        text = f"checkpoints and weights take up to about {need / 1e9:.3g} GB; {free / 1e9:.3g} GB are free in {place}"
        yield text if need < free else Note(text)

    def look_at_broker(self) -> Iterator[str]:
        settings = self.settings.broker

        async def snapshot() -> Snapshot:
            url, run_id = settings.url, self.settings.run_id
            async with await Broker.connect(url, run_id, role=Role.TRAINER, create=False) as broker:
                await broker.check_server()
                await check_untrained(broker)
                return await take_snapshot(broker)

        try:
            self.snapshot = found = asyncio.run(snapshot())
        except NoBrokerError as error:
            if self._brings_broker:
                yield f"{UP_BRINGS}; `dvp-train` alone needs one at {masked(settings.url)}"
            else:
                yield Note(f"`dvp-train` would wait for up to {settings.stall_timeout_s:g} s: {error}")
            return
        except DvpError as error:
            if not self._brings_broker:
                raise
            yield Note(f"{UP_BRINGS}; `dvp-train` alone would stop: {error}")
            return
        yield f"{masked(settings.url)} answers and permits what a trainer does"
        for reason in judge(found).reasons:
            if reason.verdict not in EXPECTED:
                yield Note(f"{reason.detail}; {reason.remedy}")

    def look_at_replicas(self) -> Iterator[str]:
        if self.snapshot is None:
            if self._brings_broker:
                return
            raise SkippedError("needs the broker")
        model = self.settings.model.path
        if not self.snapshot.live:
            command = _rollout(self.settings)
            if self._brings_broker:
                yield f"`dvp-train up` starts them; `dvp-train` alone would wait for one. Start it with\n{command}"
            else:
                yield Note(f"none is alive; the run would wait for one. Start it with\n{command}")
        digest = folder_digest(model) if any(_first_model(replica) for replica in self.snapshot.live) else ""
        for replica in self.snapshot.live:
            yield f"{replica.id}: {replica.state}, serves {replica.version}"
            if (first := _first_model(replica)) and first != digest:
                yield Note(f"{replica.id} was started with another model folder (digest {first}, not {digest})")

    @property
    def _brings_broker(self) -> bool:
        """Whether `dvp-train up` starts a broker for this run."""
        return self.settings.broker.redis_url is None

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise SkippedError("needs the tokenizer")
        return self.tokenizer

    @property
    def _train(self) -> Prompts:
        if self.train is None:
            raise SkippedError("needs data.train")
        return self.train


def count_parameters(folder: Path) -> int:
    """Number of values in the model's safetensors, without reading them. Raises ConfigError if a file is missing or
    damaged."""
    try:
        return sum(_count(file) for file in weight_files(folder))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model folder {folder}: its weights cannot be read: {error}") from None


def weight_files(folder: Path) -> list[Path]:
    """The files that Transformers reads weights from: one file, or those of an index. Raises ConfigError if there are
    none, or if one is missing."""
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(f"model folder {folder}: no {single.name} and no {INDEX} in it (pickles are never read)")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"model folder {folder}: {INDEX} cannot be read: {error!r}") from None
    if missing := [str(name) for name in names if not (folder / str(name)).is_file()]:
        raise ConfigError(f"model folder {folder}: {', '.join(missing)} is missing, which {INDEX} names")
    return [folder / name for name in names]


def _count(file: Path) -> int:
    with safe_open(file, "pt") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no mapping


def _columns(prompts: Prompts) -> str:
    (row,) = prompts.first(1)
    answer = "no answer" if row.answer_column is None else f"answer from column {row.answer_column!r}"
    return f"prompt from column {row.prompt_column!r}, {answer}"


def _rollout(settings: TrainSettings) -> str:
    """The command that starts a replica for this run."""
    options = options_of_replica(settings) | {"redis_url": masked(settings.broker.url)}
    return shlex.join(["dvp-rollout", *flags(options)])


def _answer(row: Row) -> str:
    return "none" if row.answer is None else repr(row.answer[:MAX_CHARACTERS])


def _shortened(text: str) -> str:
    half = MAX_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"


def _writable(setting: str, folder: Path) -> Path:
    """The folder, or the one in which it will be created. Raises ConfigError if this user cannot write there."""
    place = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not place.is_dir():
        raise ConfigError(f"{setting}: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}: user {os.geteuid()} cannot write to {place}")
    return place


def _first_model(replica: ReplicaHealth) -> str:
    """Digest of the folder that the replica was started with; "" if it serves a version of a trainer."""
    version = WeightVersion.parse(replica.version)
    return version.digest if version.seq == INITIAL_SEQ else ""


def _patient(part: str) -> AbstractContextManager[None]:
    return patient(f"     {part:<13}still looking", say=lambda text: sys.stderr.write(f"{text}\n"))


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def _heard() -> Iterator[list[logging.LogRecord]]:
    """What the project logs meanwhile, from INFO on, instead of its going elsewhere."""
    handler = _Listener()
    loggers = [logging.getLogger(name) for name in ("dvp_rl", "dvp_trainer")]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield handler.records
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
