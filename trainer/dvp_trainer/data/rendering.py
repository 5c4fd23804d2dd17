"""Prompts as the model reads them: data sets opened, rendered by the chat template, and turned into token ids."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from dvp_rl.contract.errors import ConfigError, RequestError
from dvp_rl.contract.job import check_task
from dvp_rl.contract.shape import Shape
from dvp_rl.engines.context import model_context
from dvp_rl.engines.tokenizer import Tokenizer, load_config, load_tokenizer, template_variables
from dvp_trainer.config import TrainSettings

from .prompts import Layout, Order, Prompts, Row, as_json, load_prompts
from .rewards import needs_answer

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

TRIAL_ROWS = 4
"""Rows per data set that are rendered, and on which the reward is tried, before anything is generated."""


def open_tokenizer(settings: TrainSettings) -> Tokenizer:
    """The model's tokenizer, with the chat template of the settings. Raises ConfigError."""
    tokenizer, file = load_tokenizer(settings.model.path), settings.data.chat_template
    if file is not None:
        try:
            tokenizer.core.chat_template = file.read_text(encoding="utf-8-sig")
            template_variables(tokenizer.core.chat_template)
        except (OSError, UnicodeDecodeError, TemplateError, RecursionError) as error:
            raise ConfigError(f"data.chat_template {file}: {error}") from None
        if tokenizer.chat_template is None:
            raise ConfigError(f"data.chat_template {file}: the file is empty")
    return replace(tokenizer, chat_template_kwargs=settings.data.chat_template_kwargs)


def open_training(settings: TrainSettings, tokenizer: Tokenizer) -> Prompts:
    """Reads every row once, so that a bad row stops the run before it starts, and renders the first ones. Raises
    ConfigError."""
    return _open(settings, tokenizer, "data.train", settings.data.train, settings.data.train_split)


def open_heldout(settings: TrainSettings, tokenizer: Tokenizer) -> Prompts | None:
    """Likewise the held-out rows; None if there are none."""
    source = settings.data.heldout
    return None if source is None else _open(settings, tokenizer, "data.heldout", source, settings.data.heldout_split)


def _open(settings: TrainSettings, tokenizer: Tokenizer, setting: str, source: str, split: str) -> Prompts:
    data, trains = settings.data, setting == "data.train"
    prompts = load_prompts(
        source,
        split=split,
        subset=data.subset,
        layout=Layout(data.prompt_column, data.answer_column, data.as_chat, data.system_prompt),
        needs_answer=needs_answer(settings.reward.name),
        order=Order.SHUFFLED if trains and data.shuffle else Order.SEQUENTIAL,
        seed=settings.seed if trains else 0,
        limit=data.limit if trains else None,
        max_prompt_tokens=data.max_prompt_tokens if trains else None,
        context=longest_sequence(settings),
        count_tokens=lambda row: len(encode_prompt(tokenizer, row, source)),
        rendering=_rendering(settings, tokenizer),
        setting=setting,
    )
    _try_rendering(settings, tokenizer, prompts)
    if not (holds_chats(prompts) or settings.episodes.harness):  # a harness makes messages of any prompt
        for name in ("chat_template", "chat_template_kwargs"):
            if getattr(data, name):
                raise ConfigError(f"data.{name} is set, but {source} holds plain text: data.as_chat makes it chats")
        if tokenizer.chat_template is not None:
            logger.warning("%s: plain text, though the model has a chat template: data.as_chat = true uses it", source)
    return prompts


def longest_sequence(settings: TrainSettings) -> int | None:
    """Tokens that prompt and completion may have together; None if the model names no limit."""
    shape = settings.model.fixed_shape
    return model_context(load_config(settings.model.path)) if shape is None else Shape.parse(shape).length


def _try_rendering(settings: TrainSettings, tokenizer: Tokenizer, prompts: Prompts) -> None:
    """Renders the first rows. Raises ConfigError if it fails, or if the system prompt leaves no trace."""
    rendered: dict[bytes, Row] = {}
    for row in prompts.first(TRIAL_ROWS):
        ids = encode_prompt(tokenizer, row, prompts.source).tobytes()
        alike = rendered.setdefault(ids, row)
        if alike.text != row.text:
            logger.warning(
                "%s: rows %d and %d differ, but become the same tokens: does the chat template show the messages?",
                *(prompts.source, alike.index, row.index),
            )
        if settings.data.system_prompt and ids == _without_system(tokenizer, row, prompts.source):
            raise ConfigError("data.system_prompt has no effect: the chat template leaves out the system's messages")


def _without_system(tokenizer: Tokenizer, row: Row, source: str) -> bytes:
    """Token ids of a row without its first message; b"" if the chat template needs one."""
    try:
        return encode_prompt(tokenizer, replace(row, prompt=row.prompt[1:]), source).tobytes()
    except ConfigError:
        return b""


def holds_chats(prompts: Prompts) -> bool:
    """Whether one of the first rows is a chat."""
    return any(not isinstance(row.prompt, str) for row in prompts.first(TRIAL_ROWS))


def compare_data(train: Prompts, heldout: Prompts, limit: int | None) -> None:
    """Warns if the score of the first `limit` held-out prompts is not what it seems: that of another task if only one
    of the data sets is chats, and partly that of training if they share prompts."""
    if holds_chats(train) != holds_chats(heldout):
        logger.warning(
            "only one of %s and %s holds chats, the other plain text: data.as_chat = true makes both chats",
            *(train.source, heldout.source),
        )
    scored = np.array([*{row.key for row in islice(heldout, limit)}])
    if shared := int(np.isin(scored, train.keys).sum()):
        logger.warning(
            "data.heldout %s: %d of %d different prompts are in data.train %s too: the score counts what is trained on",
            *(heldout.source, shared, len(scored), train.source),
        )


def _rendering(settings: TrainSettings, tokenizer: Tokenizer) -> str:
    """The settings that decide how prompts become tokens; "" for the defaults."""
    data = settings.data
    chosen = [data.as_chat, data.system_prompt, own_template(settings, tokenizer), data.chat_template_kwargs]
    return json.dumps(chosen, sort_keys=True) if data.renders else ""


def own_template(settings: TrainSettings, tokenizer: Tokenizer) -> str | None:
    """Text of the chat template that the settings name; None if they leave it to the model."""
    return tokenizer.chat_template if settings.data.chat_template else None


def encode_prompt(tokenizer: Tokenizer, row: Row, source: str) -> NDArray[np.int32]:
    """Token ids of a row's prompt. Chat messages go through the chat template, up to the start of the assistant's turn.
    Raises ConfigError naming source and row if there is no template, or it refuses the messages."""
    if not isinstance(row.prompt, str) and tokenizer.chat_template is None:
        raise ConfigError(
            f"{source}: row {row.index} is a chat, but the model has no chat template; name one with data.chat_template"
        )
    try:
        ids = tokenizer.encode(row.prompt) if isinstance(row.prompt, str) else tokenizer.encode_chat(row.prompt)
    except RequestError as error:
        raise ConfigError(f"{source}: row {row.index}: {error}") from None
    if not ids:
        raise ConfigError(f"{source}: row {row.index} becomes no token at all")
    return np.array(ids, np.int32)


class Asked:
    """Rows of a data set, and what a job asks for one."""

    def __init__(self, prompts: Prompts, tokenizer: Tokenizer, settings: TrainSettings) -> None:
        self.prompts = prompts
        self._tokenizer, self._settings = tokenizer, settings

    def of(self, row: Row) -> dict[str, Any]:
        """Fields of the row's job: a prompt to be sampled, or a task that a harness plays. Raises ConfigError."""
        settings, source = self._settings, self.prompts.source
        if not settings.episodes.harness:
            return {"prompt_ids": encode_prompt(self._tokenizer, row, source)}
        return {
            "prompt_ids": (),
            "task": task_of(row, source),
            "idle_s": settings.episodes.idle_s,
            "chat_template_kwargs": settings.data.chat_template_kwargs,
        }


def task_of(row: Row, source: str) -> dict[str, Any]:
    """A row as the harness that plays it gets it. What JSON lacks becomes text, and NaN null. Raises ConfigError if it
    is no Unicode text or too large."""
    prompt = row.prompt if isinstance(row.prompt, str) else [message.model_dump() for message in row.prompt]
    text = json.dumps(row.extra, default=as_json)
    columns = json.loads(text, parse_constant=lambda name: None)
    try:
        return check_task({"row": row.index, "prompt": prompt, "answer": row.answer, "columns": columns})
    except ValueError as error:
        raise ConfigError(f"{source}: row {row.index} cannot be sent to a harness: {error}") from None
