"""A session's OpenAI endpoint: routes, and turns in OpenAI's shape."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Annotated, Any

from fastapi import APIRouter, Body, Response
from pydantic import BaseModel

from dvp_rl.contract.openai import (
    AssistantMessage,
    CallBody,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    CompletionRequest,
    FunctionCall,
    Model,
    Models,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    TokenLogprobs,
    Turned,
    Usage,
)
from dvp_rl.http.openapi import refusals

from .examples import CHAT_EXAMPLES, COMPLETION_EXAMPLES, NO_QUEUE, NO_SESSION
from .routes import TURN, By, ModelId, Served, SessionId, Take, as_json
from .sessions import Taken

router = APIRouter(prefix="/v1/sessions/{session_id}/v1")

STREAM = "text/event-stream"
SENT: dict[str, Any] = {"content": {STREAM: {}}, "description": "The turn, or events if stream is true."}


@router.post("/chat/completions", response_model=ChatCompletion, responses={200: SENT, **TURN})
async def chat_completion(body: Annotated[ChatRequest, Body(openapi_examples=CHAT_EXAMPLES)], take: Take) -> Response:
    """A turn of a conversation. Tokens that the session has recorded are never tokenised again."""
    taken = await take(body)
    return taken if isinstance(taken, Response) else _chat(taken, body)


@router.post("/completions", response_model=TextCompletion, responses={200: SENT, **TURN})
async def completion(
    body: Annotated[CompletionRequest, Body(openapi_examples=COMPLETION_EXAMPLES)], take: Take
) -> Response:
    """A turn that continues a text. Tokens that the session has recorded are never tokenised again."""
    taken = await take(body)
    return taken if isinstance(taken, Response) else _completion(taken, body)


@router.get("/models", response_model=Models, responses=refusals(NO_SESSION, NO_QUEUE))
async def models(session_id: SessionId, service: Served, caller: By) -> Response:
    """The model of the session: the run whose weights this replica serves."""
    return as_json(Models(data=(await service.sessions.model(session_id, caller),)))


@router.get("/models/{model}", response_model=Model, responses=refusals(NO_SESSION, NO_QUEUE))
async def model(session_id: SessionId, model: ModelId, service: Served, caller: By) -> Response:
    """The model of the session, if that is its name."""
    return as_json(await service.sessions.model(session_id, caller, model))


def _chat(taken: Taken, request: ChatRequest) -> Response:
    answer, sample = taken.answer, taken.turn.sample
    calls = [
        CallBody(
            id=call.call_id or call_id(taken.index, at),
            function=FunctionCall(name=call.name, arguments=call.arguments),
        )
        for at, call in enumerate(answer.calls)
    ]
    message = AssistantMessage(
        content=None if calls and not answer.content else answer.content, tool_calls=calls or None
    )
    logprobs = [
        TokenLogprob(token=piece, logprob=logprob, bytes=list(piece.encode()))
        for piece, logprob in zip(answer.pieces, sample.logprobs.tolist(), strict=request.logprobs is True)
    ]
    choice = ChatChoice(
        message=message,
        finish_reason="tool_calls" if calls else sample.finish_reason.value,
        logprobs=TokenLogprobs(content=logprobs) if request.logprobs else None,
    )
    completion = ChatCompletion(choices=(choice,), **_common("chatcmpl", taken))
    if not request.stream:
        return as_json(completion)
    (whole,) = _dumped(completion)["choices"]
    delta, reason = whole.pop("message"), whole.pop("finish_reason")
    for at, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = at
    choices = [whole | {"delta": delta, "finish_reason": None}, {"index": 0, "delta": {}, "finish_reason": reason}]
    return _events(completion, choices, request, object="chat.completion.chunk")


def _completion(taken: Taken, request: CompletionRequest) -> Response:
    sample, pieces = taken.turn.sample, taken.answer.pieces
    offsets = [0, *accumulate(map(len, pieces))][: len(pieces)]
    logprobs = TextLogprobs(tokens=list(pieces), token_logprobs=sample.logprobs.tolist(), text_offset=offsets)
    choice = TextChoice(
        text=taken.answer.content,
        finish_reason=sample.finish_reason.value,
        logprobs=None if request.logprobs is None else logprobs,
    )
    completion = TextCompletion(choices=(choice,), **_common("cmpl", taken))
    return _events(completion, _dumped(completion)["choices"], request) if request.stream else as_json(completion)


def call_id(turn: int, index: int) -> str:
    """Id of a tool call to which the model gave none: nine letters and digits, as Mistral's chat templates demand."""
    return f"c{turn:04d}{index:04d}"


def _common(prefix: str, taken: Taken) -> dict[str, Any]:
    turn = taken.turn
    read, drawn = taken.num_prompt_tokens, len(turn.sample.token_ids)
    return {
        "id": f"{prefix}-{turn.turn_id}",
        "created": int(turn.at),
        "model": taken.session.run_id,
        "system_fingerprint": " ".join(dict.fromkeys(span.version for span in turn.sample.versions)),
        "recording": taken.recording,
        "usage": Usage(prompt_tokens=read, completion_tokens=drawn, total_tokens=read + drawn),
    }


def _events(
    completion: ChatCompletion | TextCompletion, choices: list[dict[str, Any]], request: Turned, **changed: str
) -> Response:
    """The completion as server-sent events, one for each of `choices`."""
    head = _dumped(completion) | changed
    usage = head.pop("usage")
    chunks = [head | {"choices": [choice]} for choice in choices]
    if request.stream_options is not None and request.stream_options.include_usage:
        chunks.append(head | {"choices": [], "usage": usage})
    lines = [*(json.dumps(chunk, ensure_ascii=False) for chunk in chunks), "[DONE]"]
    return Response("".join(f"data: {line}\n\n" for line in lines), media_type=STREAM)


def _dumped(body: BaseModel) -> dict[str, Any]:
    return body.model_dump(mode="json")
