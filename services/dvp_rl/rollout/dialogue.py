"""Turns of a session between what clients write and read, and the tokens that the model reads and draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dvp_rl.contract.generate import GenerateRequest
from dvp_rl.contract.openai import ChatRequest, CompletionRequest
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
from dvp_rl.engines.chat import Chat
from dvp_rl.engines.tool_calls import ToolCall

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dvp_rl.contract.group import Group
    from dvp_rl.engines.tokenizer import Tokenizer

TurnRequest = ChatRequest | CompletionRequest | GenerateRequest
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
        self._tokenizer, self._chat = tokenizer, Chat(tokenizer)

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
            text = self._text(session, request)
            parent, start = longest_text(turns, text)
            rest = text[start:]
            begins = parent is None and isinstance(request, CompletionRequest)
            encode = self._tokenizer.encode if begins else self._tokenizer.encode_rest
            context_ids = np.asarray(encode(rest), np.int32)
            token_ids = np.concatenate([history(path(turns, parent)), context_ids])
        return Prompt(rest, parent, _fork(turns, parent, request), context_ids, token_ids)

    def _text(self, session: Session, request: ChatRequest | CompletionRequest) -> str:
        if isinstance(request, CompletionRequest):
            return request.prompt
        return self._chat.render(request.messages, request.tools or (), session.chat_template_kwargs)

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
            assert self._chat.format is not None, "its prompt could be rendered"
            # A format may begin with a special token, which the content of an answer without calls does not show.
            said = drawn[:-1] if drawn[-1] in self._tokenizer.eos_ids else drawn
            content, calls = self._chat.format.parse(trim(self.added_text(read, said), stops))
            if calls:
                return Answer(content, tuple(calls), pieces)
        return Answer(trim(self.added_text(read, drawn, special=False), stops), pieces=pieces)


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
