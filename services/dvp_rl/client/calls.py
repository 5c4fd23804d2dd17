"""The API as data: what to send, and what the answer means. Nothing here uses the network."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, RootModel, ValidationError

from dvp_rl.contract.errors import (
    ConfigError,
    DvpError,
    EngineError,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
    WeightError,
)
from dvp_rl.contract.http import (
    EpisodeBody,
    EpisodeRequest,
    FinishRequest,
    Health,
    JobAccepted,
    JobRequest,
    JobStatus,
    Message,
    Problem,
    QueueHealth,
    RolloutRequest,
    RolloutResponse,
    SamplingBody,
    SessionBody,
    WeightStatus,
)
from dvp_rl.contract.job import JobState
from dvp_rl.contract.openai import ChatCompletion, ChatRequest, OpenAIProblem
from dvp_rl.contract.record import describe

R = TypeVar("R", bound=BaseModel)

ERRORS: dict[int, type[DvpError]] = {
    401: ConfigError,
    403: ConfigError,
    404: NotFoundError,
    409: WeightError,
    500: EngineError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}
"""Errors by HTTP status; 429 is OverloadedError and every other 4xx RequestError."""


class RolloutFields(TypedDict, total=False):
    """Keyword arguments of `rollout`: exactly one of prompt, prompt_ids and messages, the rest as in RolloutRequest."""

    prompt: str
    prompt_ids: Sequence[int]
    messages: Sequence[Message | Mapping[str, str]]
    chat_template_kwargs: Mapping[str, Any]
    n: int
    sampling: SamplingBody | Mapping[str, Any]
    metadata: Mapping[str, Any]
    return_text: bool


class JobFields(RolloutFields, total=False):
    job_id: str
    deadline_s: float


class MaybeEpisode(RootModel[EpisodeBody | None]):
    """An episode, or None if none waits to be played."""


@dataclass(frozen=True)
class Call(Generic[R]):
    method: str
    path: str
    answer: type[R]
    body: BaseModel | None = None
    long: bool = False
    """The answer comes when the work is done: the timeout is long, and work that may be running is not repeated, unless
    there is a key."""
    key: str = ""
    """Idempotency-Key: the server carries the call out once, however often it is sent."""
    num_retries: int = 0
    """Times that it was sent before. A gateway then chooses the replica anew."""

    def again(self) -> Call[R]:
        """The call, to be sent once more."""
        return replace(self, num_retries=self.num_retries + 1)


def rollout(fields: RolloutFields) -> Call[RolloutResponse]:
    return Call("POST", "/v1/rollouts", RolloutResponse, _body(RolloutRequest, fields), long=True)


def submit(fields: JobFields) -> Call[JobAccepted]:
    """The job id is chosen here, so that sending the same call twice submits one job."""
    return Call("POST", "/v1/jobs", JobAccepted, _body(JobRequest, {"job_id": uuid.uuid4().hex, **fields}))


def job(job_id: str) -> Call[JobStatus]:
    return Call("GET", f"/v1/jobs/{quote(job_id, safe='')}", JobStatus)


def delete(job_id: str) -> Call[JobStatus]:
    return Call("DELETE", f"/v1/jobs/{quote(job_id, safe='')}", JobStatus)


def take_episode(wait_s: float) -> Call[MaybeEpisode]:
    """The key is chosen here, so that sending the same call twice takes one episode."""
    body = EpisodeRequest(wait_s=wait_s)
    return Call("POST", "/v1/episodes", MaybeEpisode, body, key=uuid.uuid4().hex)


def chat(session_id: str, fields: Mapping[str, Any], key: str) -> Call[ChatCompletion]:
    """`fields`: those of ChatRequest. `key`: names the turn within its session."""
    path = f"/v1/sessions/{quote(session_id, safe='')}/v1/chat/completions"
    return Call("POST", path, ChatCompletion, _body(ChatRequest, fields), long=True, key=key)


def session(session_id: str) -> Call[SessionBody]:
    return Call("GET", f"/v1/sessions/{quote(session_id, safe='')}", SessionBody)


def beat_session(session_id: str) -> Call[SessionBody]:
    return Call("POST", f"/v1/sessions/{quote(session_id, safe='')}/heartbeat", SessionBody)


def finish_session(session_id: str, request: FinishRequest) -> Call[SessionBody]:
    return Call("POST", f"/v1/sessions/{quote(session_id, safe='')}/finish", SessionBody, request)


def delete_session(session_id: str, error: str = "") -> Call[SessionBody]:
    """`error`: why an episode of a training run cannot be played."""
    query = f"?error={quote(error, safe='', errors='replace')}" if error else ""
    return Call("DELETE", f"/v1/sessions/{quote(session_id, safe='')}{query}", SessionBody)


def queue() -> Call[QueueHealth]:
    return Call("GET", "/v1/queue", QueueHealth)


def weights() -> Call[WeightStatus]:
    return Call("GET", "/v1/weights", WeightStatus)


def reload_weights() -> Call[WeightStatus]:
    return Call("POST", "/v1/weights", WeightStatus, long=True)


def ready() -> Call[Health]:
    return Call("GET", "/readyz", Health)


def parse(call: Call[R], response: httpx.Response) -> R:
    """The typed answer. Raises the error of dvp_rl.contract.errors that the problem document stands for."""
    if not response.is_success:
        raise error_of(response)
    try:
        return call.answer.model_validate_json(response.content or b"null")  # 204: nothing
    except ValidationError as error:
        raise DvpError(describe(f"answer to {call.method} {call.path}", error)) from None


def finished(status: JobStatus) -> RolloutResponse | None:
    """The result of a job that is done, None while it is not. Raises EngineError if it is dead."""
    if status.status is JobState.DEAD:
        raise EngineError(status.error or "the job is dead")
    return status.group if status.status is JobState.DONE else None


def error_of(response: httpx.Response) -> DvpError:
    problem, code = _problem(response)
    if response.status_code == 429:
        return OverloadedError(problem.detail, retry_after(response))
    kind = ERRORS.get(response.status_code)
    if kind is not None:
        return kind(problem.detail)
    if response.is_client_error:
        return RequestError(problem.detail, [error.model_dump() for error in problem.errors], code)
    return DvpError(f"{response.status_code} {problem.title}: {problem.detail}")


def _problem(response: httpx.Response) -> tuple[Problem, str | None]:
    """The problem document, or one made up, and OpenAI's code of the error if it has one."""
    with suppress(ValidationError):
        problem = OpenAIProblem.model_validate_json(response.content)
        return problem, problem.error.code
    with suppress(ValidationError):
        return Problem.model_validate_json(response.content), None
    return Problem(title=response.reason_phrase, status=response.status_code, detail=response.text[:200]), None


def retry_after(response: httpx.Response) -> float:
    """Seconds of the Retry-After header; 1 if it is absent or a date."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 1.0


def _body(kind: type[R], fields: Mapping[str, Any]) -> R:
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        raise RequestError(describe("request", error)) from None
