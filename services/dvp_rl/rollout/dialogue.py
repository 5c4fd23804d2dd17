"""Turns of a session between what clients write and read, and the tokens that the model reads and draws."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dvp_rl.contract.errors import RequestError
from dvp_rl.contract.generate import GenerateRequest
from dvp_rl.contract.openai import ChatMessage, ChatRequest, CompletionRequest
from dvp_rl.contract.session import (
    Fork,
    Session,
    Turn,
    branches,
    digest,
    history,
    longest_history,
    longest_text,
    path,
)
from dvp_rl.engines.tool_calls import ToolCall, ToolFormat, tool_format

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dvp_rl.contract.group import Group
    from dvp_rl.engines.tokenizer import Tokenizer

TurnRequest = ChatRequest | CompletionRequest | GenerateRequest
MAX_BLAMED = 64
"""Most messages of which the one that a chat template refuses is searched for."""
CONTEXT_TOKENS = 8
"""Tokens before a turn that are decoded with it: what a token's text is can depend on those before it."""


@dataclass(frozen=True)
class Prompt:
    """What the model reads for a turn."""

    text: str
    """What `context_ids` add to the recorded text."""
    parent: int | None
    fork: Fork | None
    context_ids: NDArray[np.int32]
    """[C] the tokens that the record does not hold yet."""
    token_ids: NDArray[np.int32]
    """[P] all tokens: the recorded ones and `context_ids`."""


@dataclass(frozen=True)
class Answer:
    """A turn as the client reads it."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    pieces: tuple[str, ...] = ()
    """Texts of the drawn tokens, if the client asked for their log-probs."""

    @property
    def digest(self) -> str:
        return digest(json.dumps([self.content, [[call.name, call.arguments] for call in self.calls]]))


class Dialogue:
    """Use it from one thread at a time, like its tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def check(self, session: Session) -> None:
        """Raises RequestError if the chat template has no such arguments."""
        self._tokenizer.check_arguments(session.chat_template_kwargs)

    def prompt(self, session: Session, turns: Sequence[Turn], request: TurnRequest) -> Prompt:
        """The recorded tokens of the longest beginning of the request that the session has, then the rest: a text in
        tokens of its own, or the client's tokens. Raises RequestError if the chat template cannot render the request.
        """
        import numpy as np

        if isinstance(request, GenerateRequest):
            token_ids = np.asarray(request.token_ids, np.int32)
            parent, start = longest_history(turns, token_ids)
            context_ids = token_ids[start:]
            rest = self.added_text(token_ids[:start], context_ids)
        else:
            text = self._render(session, request) if isinstance(request, ChatRequest) else request.prompt
            parent, start = longest_text(turns, text)
            rest = text[start:]
            begins = parent is None and isinstance(request, CompletionRequest)
            encode = self._tokenizer.encode if begins else self._tokenizer.encode_rest
            context_ids = np.asarray(encode(rest), np.int32)
            token_ids = np.concatenate([history(path(turns, parent)), context_ids])
        return Prompt(rest, parent, _fork(turns, parent, request), context_ids, token_ids)

    def added_text(self, before: NDArray[np.int32], ids: NDArray[np.int32], *, special: bool = True) -> str:
        """The text that tokens add to that of the tokens before them; `special`: special tokens included."""
        last = before[-CONTEXT_TOKENS:].tolist()
        text = self._tokenizer.decode(last, skip_special_tokens=not special)
        whole = self._tokenizer.decode([*last, *ids.tolist()], skip_special_tokens=not special)
        if whole.startswith(text):
            return whole[len(text) :]
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=not special)  # they complete a character

    def turn(self, turn_id: str, prompt: Prompt, group: Group, answer: Answer) -> Turn:
        """The record of a turn: the only sample of `group`, which was drawn after the prompt."""
        (sample,) = group.samples
        text = prompt.text + self.added_text(prompt.token_ids, sample.token_ids)
        return Turn(
            turn_id=turn_id,
            parent=prompt.parent,
            context_ids=prompt.context_ids,
            sample=sample,
            engine=group.engine,
            replica_id=group.replica_id,
            num_chars=len(text),
            text_digest=digest(text),
            answer_digest=answer.digest,
            fork=prompt.fork,
            at=group.finished_at,
        )

    def answer(
        self,
        read: NDArray[np.int32],
        drawn: NDArray[np.int32],
        request: TurnRequest,
        session: Session,
    ) -> Answer:
        """What the client is told of tokens that were drawn after the tokens `read`."""
        stops = (*session.sampling.stop, *request.drawn.stop)
        wants_pieces = not isinstance(request, GenerateRequest) and request.logprobs not in (None, False)
        pieces = tuple(self._tokenizer.pieces(drawn.tolist())) if wants_pieces else ()
        if isinstance(request, ChatRequest) and request.tools and request.tool_choice != "none":
            assert self._format is not None, "its prompt could be rendered"
            # A format may begin with a special token, which the content of an answer without calls does not show.
            said = drawn[:-1] if drawn[-1] in self._tokenizer.eos_ids else drawn
            content, calls = self._format.parse(trim(self.added_text(read, said), stops))
            if calls:
                return Answer(content, tuple(calls), pieces)
        return Answer(trim(self.added_text(read, drawn, special=False), stops), pieces=pieces)

    @cached_property
    def _format(self) -> ToolFormat | None:
        ends = self._tokenizer.core.convert_ids_to_tokens(sorted(self._tokenizer.eos_ids))
        return tool_format(
            lambda messages, tools, prompt: self._tokenizer.render(messages, {}, tools, add_generation_prompt=prompt),
            ends,
        )

    def _render(self, session: Session, request: ChatRequest) -> str:
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None
        if tools and self._format is None:
            raise RequestError.at("tools", f"{len(tools)} tools", "null: this model's chat template calls none as JSON")
        messages = [self._message(index, message) for index, message in enumerate(request.messages)]
        kwargs = session.chat_template_kwargs
        try:
            return self._tokenizer.render(messages, kwargs, tools)
        except RequestError as error:
            blamed = self._blamed(messages, kwargs, tools, str(error)) if len(messages) <= MAX_BLAMED else None
            if blamed is None:
                raise
            raise RequestError.at(f"messages.{blamed}", f"role {messages[blamed]['role']}", str(error)) from None

    def _blamed(
        self,
        messages: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        reason: str,
    ) -> int | None:
        """Index of the first message with which the chat template refuses the conversation, for the same reason."""
        for end in range(1, len(messages) + 1):
            try:
                self._tokenizer.render(messages[:end], kwargs, tools)
            except RequestError as error:
                if str(error) == reason:
                    return end - 1
        return None

    def _message(self, index: int, message: ChatMessage) -> dict[str, Any]:
        """The message as chat templates read it."""
        role = "system" if message.role == "developer" else message.role
        given = message.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
        turn = {"role": role, "content": message.text, **given}
        if message.tool_calls:
            if self._format is None:
                raise RequestError.at(
                    f"messages.{index}.tool_calls", f"{len(message.tool_calls)} calls", "null for this model"
                )
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": self._arguments(f"messages.{index}.tool_calls.{at}", call.function.arguments),
                    },
                }
                for at, call in enumerate(message.tool_calls)
            ]
        return turn

    def _arguments(self, field: str, arguments: str) -> Any:
        """Arguments as the chat template takes them: a text that it inserts unchanged, or an object."""
        try:
            parsed = json.loads(arguments)
            json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()  # a lone surrogate is no text
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise RequestError.at(f"{field}.function.arguments", repr(arguments[:80]), "a JSON object, as text")
        return arguments if self._format and self._format.verbatim else parsed


def _fork(turns: Sequence[Turn], parent: int | None, request: TurnRequest) -> Fork | None:
    """Why a turn with this parent opens a branch; None if it does not."""
    if not turns or any(branch[-1] == parent for branch in branches(turns)):
        return None
    if not isinstance(request, ChatRequest):
        return Fork.REWRITTEN
    said = next((message for message in reversed(request.messages) if message.role == "assistant"), None)
    if said is None:
        return Fork.REWRITTEN
    calls = [ToolCall(call.function.name, call.function.arguments) for call in said.tool_calls or ()]
    kept = {turn.answer_digest for turn in path(turns, parent)}
    known = {turn.answer_digest for turn in turns} - kept
    return Fork.DRIFT if Answer(said.text, tuple(calls)).digest in known else Fork.REWRITTEN


def trim(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]
