"""Converts between text and token ids for users; the services exchange only token ids."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.sandbox import SandboxedEnvironment
from tokenizers.decoders import DecodeStream
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from dvp_rl.contract.errors import ConfigError, RequestError
from dvp_rl.contract.http import Message


@dataclass(frozen=True)
class Tokenizer:
    """A model folder's tokenizer. Use one instance per thread: the fast tokenizers are not re-entrant."""

    eos_ids: frozenset[int]
    """Token ids that end a sample: the union of generation config, config and tokenizer. Never empty."""
    pad_id: int
    """The padding token, or an end token if the folder names none."""
    vocab_size: int
    """Number of token ids that have text. A model may have more rows, which are never sampled after training."""
    core: Any
    """The underlying Hugging Face tokenizer."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for calls that give none, e.g. {"enable_thinking": False}."""

    @property
    def chat_template(self) -> str | None:
        """Text of the chat template; None if there is none. Of several, the one that is used without tools."""
        own = self.core.chat_template
        return (own.get("default") if isinstance(own, dict) else own) or None

    def encode(self, text: str) -> list[int]:
        """Encodes text with the special tokens (such as beginning-of-sequence) that the folder asks for."""
        ids: list[int] = self.core.encode(text)
        return ids

    def encode_rest(self, text: str) -> list[int]:
        """Encodes text that follows other tokens, or that names its special tokens itself, as rendered chats do."""
        ids: list[int] = self.core.encode(text, add_special_tokens=False)
        return ids

    def encode_chat(self, messages: Sequence[Message], kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens of `render`."""
        return self.encode_rest(self.render([message.model_dump() for message in messages], kwargs))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of messages by the chat template, ready for the assistant's turn if `add_generation_prompt`.
        `kwargs`: its further arguments. `tools`: as OpenAI describes them.

        Raises RequestError if the folder has no chat template, if the template has no such argument, or if it refuses
        the messages.
        """
        kwargs = self.chat_template_kwargs if kwargs is None else kwargs
        if self.chat_template is None:
            raise RequestError(
                "messages: this model's tokenizer has no chat template; send prompt or prompt_ids instead",
                [{"field": "messages", "value": f"{len(messages)} messages", "allowed": "null for this model"}],
            )
        self.check_arguments(kwargs)
        try:
            text: str = self.core.apply_chat_template(
                messages, tools, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
            )
        except Exception as error:  # noqa: BLE001 - a template is a program by the model's author
            raise RequestError(
                f"messages: the chat template refused them: {error}",
                [{"field": "messages", "value": [message["role"] for message in messages], "allowed": str(error)}],
            ) from None
        return text

    def check_arguments(self, kwargs: Mapping[str, Any]) -> None:
        """Raises RequestError for an argument that would have no effect: Transformers drops what the template does not
        read, and takes what has the name of an argument of its own."""
        if not kwargs:
            return
        try:
            known = self.template_arguments(self.chat_template or "")
        except (TemplateError, RecursionError) as error:
            raise RequestError(f"chat_template_kwargs: the chat template cannot be read: {error}") from None
        for name in kwargs.keys() - known:
            near, allowed = get_close_matches(name, known, n=1), ", ".join(known) or "none"
            hint = f"did you mean {near[0]}?" if near else f"its arguments: {allowed}"
            raise RequestError(
                f"chat_template_kwargs: the chat template has no argument {name!r}; {hint}",
                [{"field": f"chat_template_kwargs.{name}", "value": kwargs[name], "allowed": allowed}],
            )

    def template_arguments(self, template: str) -> list[str]:
        """Names of the arguments that only this chat template has. Raises jinja2.TemplateError (bad syntax)."""
        common = inspect.signature(self.core.apply_chat_template).parameters.keys()
        given = {*common, *self.core.SPECIAL_TOKENS_ATTRIBUTES, "messages", "conversations"}
        return sorted(template_variables(template) - given)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.core.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token adds to those before it, special tokens included; "" for one that ends within a
        character. For display: a tokenizer that cannot decode step by step gives the text of each token alone."""
        stream = DecodeStream(skip_special_tokens=False)
        try:
            return [stream.step(self.core.backend_tokenizer, token_id) or "" for token_id in token_ids]
        except Exception:  # noqa: BLE001 - no `tokenizers` backend, or bytes that are no text (a plain Exception)
            return [self.decode([token_id], skip_special_tokens=False) for token_id in token_ids]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a local model folder. Raises ConfigError if there is none or it has no end token."""
    check_model_folder(folder)
    try:
        core = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - Hugging Face raises many types for a bad folder
        raise ConfigError(f"model folder {folder}: its tokenizer cannot be loaded: {_first_line(error)}") from None
    eos_ids = frozenset(_end_ids(folder)) | ({core.eos_token_id} if core.eos_token_id is not None else set())
    if not eos_ids:
        raise ConfigError(
            f"model folder {folder}: tokenizer without end token; set eos_token in tokenizer_config.json or "
            "eos_token_id in generation_config.json, otherwise no sample could ever end"
        )
    pad_id = core.pad_token_id if core.pad_token_id is not None else min(eos_ids)
    return Tokenizer(eos_ids=eos_ids, pad_id=pad_id, vocab_size=len(core), core=core)


@lru_cache(maxsize=16)
def template_variables(template: str) -> frozenset[str]:
    """Names of the variables that a chat template reads from its caller. Raises jinja2.TemplateError (bad syntax)."""
    environment = SandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    plain = re.sub(r"\{%[+-]?\s*(?:end)?generation\s*[+-]?%\}", "", template)  # a tag that only Transformers knows
    supplied = environment.globals.keys() | {"raise_exception", "strftime_now"}
    return frozenset(meta.find_undeclared_variables(environment.parse(plain)) - supplied)


def check_model_folder(folder: Path) -> None:
    """Raises ConfigError unless `folder` looks like a Hugging Face model folder on this machine, and can be read."""
    try:
        if not folder.is_dir():
            raise ConfigError(
                f"model folder {folder}: no such folder; give a local Hugging Face model folder "
                "(for a Hub model, first run: hf download NAME --local-dir FOLDER)"
            )
        if not (folder / "config.json").is_file():
            names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
            raise ConfigError(
                f"model folder {folder}: no config.json in it (found {names}); expected a Hugging Face folder"
            )
        for file in filter(Path.is_file, (*folder.glob("*.json"), *folder.glob("*.safetensors"))):
            file.open("rb").close()
    except PermissionError as error:
        raise ConfigError(
            f"model folder {folder}: user {os.geteuid()} may not read {error.filename}. Transformers writes weights "
            "for their owner alone; `chmod -R a+rX` lets everybody read them"
        ) from None


def load_config(folder: Path) -> Any:
    """The model's configuration. Raises ConfigError if there is none or Transformers does not know it."""
    check_model_folder(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - as above
        raise ConfigError(f"model folder {folder}: config.json cannot be used: {_first_line(error)}") from None


def _end_ids(folder: Path) -> set[int]:
    """End ids that config.json and generation_config.json name; each may be absent, a number or a list."""
    sources = [load_config(folder)]
    if (folder / "generation_config.json").is_file():
        try:
            sources.append(GenerationConfig.from_pretrained(folder, local_files_only=True))
        except Exception as error:  # noqa: BLE001 - as above
            raise ConfigError(f"model folder {folder}: generation_config.json: {_first_line(error)}") from None
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
