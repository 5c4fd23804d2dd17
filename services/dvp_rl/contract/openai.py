"""OpenAI's chat and text completions, as far as the constrained policy can serve them.

A setting that would prune or reweight tokens otherwise than min-p is refused with a reason: the log-probs would not be
those of the sampler. So is one that nothing here obeys. None is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from .http import MAX_PROMPT_CHARS, Body, Problem, TokenId, example
from .job import Metadata
from .json_schema import check_object_schema
from .sampling import MAX_NEW_TOKENS, MAX_SEED, MAX_STOP_TOKENS, Stops, StopText

CONTEXT_FULL = "context_length_exceeded"
"""OpenAI's code of the error after which a conversation cannot go on."""
MAX_MESSAGES = 1024
MAX_TOOLS = 128

Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]


class Lenient(Body):
    """A part of a message. Clients send back answers with fields of their own, which no chat template reads."""

    model_config = Body.model_config | {"extra": "ignore"}


class TextPart(Lenient):
    """One part of a message's content."""

    type: Literal["text"]
    """Only text."""
    text: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)]
    """The text."""


class FunctionCall(Lenient):
    """What a tool is called with."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the function."""
    arguments: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)]
    """A JSON object, as text."""


class ToolCallBody(Lenient):
    """One call of a tool."""

    id: Annotated[str, Field(max_length=256)]
    """Id, which the tool's answer repeats."""
    type: Literal["function"] = "function"
    """Only functions."""
    function: FunctionCall
    """The call."""


class ChatMessage(Lenient):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks. `developer` is another name of `system`."""
    content: (
        Annotated[str, Field(max_length=MAX_PROMPT_CHARS)]
        | Annotated[list[TextPart], Field(max_length=256, fail_fast=True)]
        | None
    ) = None
    """What is said."""
    name: Annotated[str, Field(max_length=256)] | None = None
    """Name of the speaker, for templates that show it."""
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """What the assistant called."""
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    """The call that a tool answers."""
    reasoning_content: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None
    """Thoughts of the assistant, for templates that show them apart from the content."""

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionSpec(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    """Name of the function."""
    description: Annotated[str, Field(max_length=65_536)] | None = None
    """What it does."""
    parameters: Metadata | None = None
    """JSON schema of its arguments: an object of at most 16 KiB."""
    strict: Literal[False] | None = None
    """Only null or false: a grammar would prune tokens."""

    @model_validator(mode="after")
    def _is_object(self) -> Self:
        if self.parameters:
            try:
                check_object_schema(self.parameters)
            except ValueError as error:
                raise ValueError(f"parameters in JSON schema: {error}") from None
        return self


class Tool(Body):
    """One tool."""

    type: Literal["function"]
    """Only functions."""
    function: FunctionSpec
    """The function."""


class StreamOptions(Body):
    """What a stream has besides the answer."""

    include_usage: bool = False
    """Whether a last chunk tells the numbers of tokens."""
    include_obfuscation: bool | None = None
    """Has no effect: nothing is added to chunks."""


class ResponseFormat(Body):
    """Form of the answer."""

    type: Literal["text"]
    """Only text: a grammar would prune tokens."""


def _listed(given: object) -> object:
    return () if given is None else (given,) if isinstance(given, str) else given


class Drawn(Body):
    """How tokens are drawn, as clients of other engines say it."""

    AT: ClassVar = ""
    """Where these fields are in a request."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    """Most tokens of the answer. Default: the session's sampling.max_tokens, which is the most in a training run's
    episodes. Less if the context ends before."""
    stop: Annotated[Stops, BeforeValidator(_listed, Stops | StopText | None)] = ()
    """Strings that end the answer, besides the session's."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    """Token ids that end the answer, besides the session's and the model's end of sequence."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """The answer is a function of it, and of how the engine computes. Default: a stream of the session's own seed."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """Only null or the session's: an episode is drawn from one policy."""
    min_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Only null or the session's, for the same reason."""
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    """Only 1."""
    top_p: One | None = None
    """Only 1: nothing but min-p may prune, or the log-probs would not be the sampler's."""
    top_k: Annotated[int, Field(ge=-1, le=0)] | None = None
    """Only -1, 0 or null, for the same reason."""
    presence_penalty: Zero | None = None
    """Only 0: the policy that is trained has no penalties."""
    frequency_penalty: Zero | None = None
    """Only 0, for the same reason."""
    repetition_penalty: One | None = None
    """Only 1, for the same reason."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    """Only empty, for the same reason."""

    @property
    def limit(self) -> int | None:
        return self.max_tokens


class Turned(Drawn):
    """What both kinds of turns have in common."""

    READ: ClassVar[str]
    """The field that the model is to continue."""

    model: Annotated[str, Field(max_length=256)]
    """The run's id, as `GET .../models` names it."""
    stream: bool | None = None
    """Whether the answer comes as server-sent events. It is sent when it is complete."""
    stream_options: StreamOptions | None = None
    """What a stream has besides the answer."""
    user: Annotated[str, Field(max_length=1024)] | None = None
    """Has no effect."""
    metadata: Metadata | None = None
    """Has no effect: a session has its own."""
    store: bool | None = None
    """Has no effect."""

    @property
    def drawn(self) -> Drawn:
        return self


class ChatRequest(Turned):
    """A turn of a conversation."""

    READ: ClassVar = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """The whole conversation. What the session has recorded of it is read from the record, token for token."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Tools that the model may call, rendered by its chat template."""
    tool_choice: Literal["auto", "none"] | None = None
    """Only auto and none: to force a call, a grammar would prune tokens. none: calls are not read from the answer."""
    parallel_tool_calls: Literal[True] | None = None
    """Only true or null: nothing keeps the model from several calls."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    """Newer name of max_tokens."""
    logprobs: bool | None = None
    """Whether the answer has the log-probability of each token under the constrained policy."""
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """Only 0: other tokens' log-probs are not recorded."""
    response_format: ResponseFormat | None = None
    """Only text."""

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Turned):
    """A turn that continues a text."""

    READ: ClassVar = "prompt"

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]
    """The whole text so far. What the session has recorded of it is read from the record, token for token."""
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """null for none; 0 or 1 for the log-probability of each token under the constrained policy."""
    echo: Literal[False] | None = None
    """Only false."""
    suffix: None = None
    """Only null."""
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    """Only 1."""


class ErrorBody(Body):
    """An error as OpenAI's clients read it."""

    message: str
    """What was wrong here, and what to do."""
    type: str
    """What kind of error this is."""
    param: str | None
    """The first field that is wrong."""
    code: str | None
    """context_length_exceeded if the context or the session is full, else null."""


class OpenAIProblem(Problem):
    """Problem details that are an error of OpenAI's too."""

    error: ErrorBody
    """The same for OpenAI's clients."""


MODEL = {"id": "default", "object": "model", "created": 1795855048, "owned_by": "dvp-rl", "max_model_len": 4096}


class Model(Body):
    """What a replica serves: a run's weights."""

    model_config = example(**MODEL)

    id: str
    """The run's id."""
    object: Literal["model"] = "model"
    """Always model."""
    created: int
    """Unix time in seconds at which this replica started."""
    owned_by: Literal["dvp-rl"] = "dvp-rl"
    """Always dvp-rl."""
    max_model_len: int
    """Most tokens of prompt and answer together."""


class Models(Body):
    """The only model."""

    model_config = example(object="list", data=[MODEL])

    object: Literal["list"] = "list"
    """Always list."""
    data: tuple[Model, ...]
    """One entry."""


class Recording(Body):
    """What the session recorded of a turn."""

    turn: int
    """Index of the turn."""
    parent: int | None = None
    """The turn that it continues; null if it begins with an empty context."""
    fork: str | None = None
    """Why it opened another branch: rewritten (the client sent another history, or drew from it again) or drift (the
    chat template renders the recorded answer as another text than was drawn); null if it opened none."""


class Usage(Body):
    """Numbers of tokens."""

    prompt_tokens: int
    """What the model read."""
    completion_tokens: int
    """What it drew."""
    total_tokens: int
    """Both."""


class CallBody(Body):
    """A call of a tool that was read from the answer."""

    id: str
    """The model's own id, or one made up."""
    type: Literal["function"] = "function"
    """Always function."""
    function: FunctionCall
    """The call, its arguments as the model wrote them."""


class AssistantMessage(Body):
    """What the model said. Sent back unchanged, it is recognised."""

    role: Literal["assistant"] = "assistant"
    """Always assistant."""
    content: str | None
    """The text without special tokens, up to a stop string, or up to the calls; null if there are only calls."""
    tool_calls: Annotated[list[CallBody] | None, Field(exclude_if=lambda calls: calls is None)] = None
    """The calls; absent if there is none."""


class TokenLogprob(Body):
    """One token drawn."""

    token: str
    """Its text; empty if it ends inside a character."""
    logprob: float
    """Natural log-probability under the constrained policy."""
    bytes: list[int]
    """The text in UTF-8."""
    top_logprobs: tuple[()] = ()
    """Always empty."""


class TokenLogprobs(Body):
    """All tokens drawn."""

    content: list[TokenLogprob]
    """In order."""
    refusal: None = None
    """Always null."""


class ChatChoice(Body):
    """The answer."""

    index: Literal[0] = 0
    """Always 0."""
    message: AssistantMessage
    """What the model said."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    """Why it ended."""
    logprobs: TokenLogprobs | None = None
    """null unless they were asked for."""


class TextLogprobs(Body):
    """All tokens drawn."""

    tokens: list[str]
    """Their texts; empty for one that ends inside a character."""
    token_logprobs: list[float]
    """Natural log-probabilities under the constrained policy."""
    top_logprobs: None = None
    """Always null."""
    text_offset: list[int]
    """Where each text begins in all of them joined."""


class TextChoice(Body):
    """The answer."""

    index: Literal[0] = 0
    """Always 0."""
    text: str
    """What the model wrote, without special tokens and up to a stop string."""
    finish_reason: Literal["stop", "length"]
    """Why it ended."""
    logprobs: TextLogprobs | None = None
    """null unless they were asked for."""


class Completed(Body):
    """What both kinds of answers have in common."""

    id: str
    """Id of the turn, with a prefix."""
    created: int
    """Unix time in seconds."""
    model: str
    """The run's id."""
    system_fingerprint: str
    """The weights that drew the answer, as run_id:seq:digest; several if they were swapped meanwhile."""
    recording: Recording
    """What the session recorded."""
    usage: Usage
    """How many tokens it took."""


RECORDED: dict[str, Any] = {
    "created": 1795855048,
    "model": "default",
    "system_fingerprint": "default:0:26c3b9c3533dd897",
    "recording": {"turn": 0, "parent": None, "fork": None},
    "usage": {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9},
}


class ChatCompletion(Completed):
    """A turn of a conversation."""

    model_config = example(
        id="chatcmpl-9b2f0f6d",
        object="chat.completion",
        choices=[{"index": 0, "message": {"role": "assistant", "content": "85"}, "finish_reason": "stop"}],
        **RECORDED,
    )

    object: Literal["chat.completion"] = "chat.completion"
    """Always chat.completion."""
    choices: tuple[ChatChoice]
    """One answer."""


class TextCompletion(Completed):
    """A turn that continued a text."""

    model_config = example(
        id="cmpl-9b2f0f6d",
        object="text_completion",
        choices=[{"index": 0, "text": "85", "finish_reason": "stop"}],
        **RECORDED,
    )

    object: Literal["text_completion"] = "text_completion"
    """Always text_completion."""
    choices: tuple[TextChoice]
    """One answer."""
