"""vLLM's token wire: routes, and samples in its shape."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from dvp_rl.contract.generate import GenerateRequest, GenerateResponse
from dvp_rl.contract.group import Sample
from dvp_rl.contract.openai import Model, Models, Recording, Usage
from dvp_rl.http.openapi import refusals

from .answers import Streamed
from .examples import GENERATE_EXAMPLES, LOADING, NO_MODEL, NOT_GENERATED, NOT_ONLY_MIN_P
from .routes import TURN, By, ModelId, Served, Take, as_json, served_while_connected
from .service import Service

router = APIRouter()
Asked = Annotated[GenerateRequest, Body(openapi_examples=GENERATE_EXAMPLES)]


@router.post(
    "/inference/v1/generate",
    response_model=GenerateResponse,
    responses=refusals(NOT_ONLY_MIN_P, NOT_GENERATED, LOADING),
)
async def generate(body: Asked, request: Request, service: Served, caller: By) -> Response:
    """Samples of token ids now, on this replica, for clients of vLLM. Generation stops when the client disconnects."""
    group = await served_while_connected(service.generate(body, caller), request)
    if isinstance(group, Response):
        return group
    return _answer(body, service, group.samples, name=group.job_id, at=group.finished_at)


@router.post(
    "/v1/sessions/{session_id}/inference/v1/generate",
    response_model=GenerateResponse,
    responses=TURN,
)
async def generate_turn(body: Asked, take: Take, service: Served) -> Response:
    """A turn that the client gives as token ids, for clients of vLLM with the session's base_url."""
    taken = await take(body)
    if isinstance(taken, Response):
        return taken
    turn = taken.turn
    return _answer(body, service, [turn.sample], name=turn.turn_id, at=turn.at, recording=taken.recording)


@router.get("/v1/models", response_model=Models, responses=refusals(LOADING))
async def served_models(service: Served) -> Response:
    """The only model: the run whose weights this replica serves."""
    return as_json(Models(data=(service.replica.model(),)))


@router.get("/v1/models/{model}", response_model=Model, responses=refusals(NO_MODEL, LOADING))
async def served_model(model: ModelId, service: Served) -> Response:
    """The model, if that is its name."""
    return as_json(service.replica.model(model))


def _answer(
    request: GenerateRequest,
    service: Service,
    samples: Sequence[Sample],
    *,
    name: str,
    at: float,
    recording: Recording | None = None,
) -> Response:
    """`name`: what to call an unnamed request. `at`: Unix time in seconds."""
    read, drawn = len(request.token_ids), sum(len(sample.token_ids) for sample in samples)
    body = GenerateResponse(
        request_id=request.request_id or name,
        created=int(at),
        model=service.replica.run_id,
        prompt_token_ids=request.token_ids if request.return_token_ids else None,
        usage=Usage(prompt_tokens=read, completion_tokens=drawn, total_tokens=read + drawn),
        recording=recording,
        choices=(),
    )
    wants_logprobs = request.sampling_params.logprobs is not None
    return Streamed(nullcontext(service.replica.prompts.generated(body, samples, logprobs=wants_logprobs)))
