"""vLLM's token wire, `POST /inference/v1/generate`, as far as the constrained policy can serve it: token ids in, token
ids and log-probs out. As in dvp_rl.contract.openai, a setting is obeyed, or refused with a reason; never ignored.

Fields and their meanings are those of vLLM 0.32 (entrypoints/scale_out/token_in_token_out/protocol.py).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .group import FinishReason, Sample, VersionSpan
from .http import Body, Counts, Numbers, RolloutRequest, SamplingBody, TokenId, TokenIds, example
from .job import MAX_SAMPLES
from .openai import Drawn, Recording, Usage
from .sampling import MAX_NEW_TOKENS


class GenerateSampling(Drawn):
    """How tokens are drawn."""

    AT: ClassVar = "sampling_params."
    """As in Drawn."""

    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Number of samples. In a session only 1."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """Default: 1. In a session only null or the session's: an episode is drawn from one policy."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    """Most tokens of a sample. Default: as many as the context holds; in a session, its sampling.max_tokens, which is
    the most in a training run's episodes."""
    min_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Tokens less likely than min_p times the most likely one are never drawn. Default: e^-13. In a session only null
    or the session's."""
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """null for none; 0 or 1 for the log-probability of each token under the constrained policy."""
    prompt_logprobs: None = None
    """Only null: those of the prompt are not computed."""
    min_tokens: Annotated[int, Field(ge=0, le=0)] | None = None
    """Only 0: it would prune the end of sequence."""
    ignore_eos: Literal[False] | None = None
    """Only false: the model's end of sequence ends a sample."""
    bad_words: Annotated[list[str], Field(max_length=0)] | None = None
    """Only empty: nothing but min-p may prune."""
    allowed_token_ids: None = None
    """Only null, for the same reason."""
    structured_outputs: None = None
    """Only null, for the same reason."""
    detokenize: bool | None = None
    """Has no effect: answers are token ids."""
    skip_special_tokens: bool | None = None
    """Has no effect, for the same reason."""
    spaces_between_special_tokens: bool | None = None
    """Has no effect, for the same reason."""
    include_stop_str_in_output: bool | None = None
    """Has no effect: the tokens of a stop string are in the answer."""
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] | None = None
    """Has no effect: no routed experts are told."""


class GenerateRequest(Body):
    """Tokens to be continued."""

    READ: ClassVar = "token_ids"
    """As in dvp_rl.contract.openai.Turned."""

    token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
    """The prompt. In a session, all tokens so far: what the session has recorded of them is not recorded again."""
    sampling_params: GenerateSampling = GenerateSampling()
    """How tokens are drawn, and when a sample ends."""
    model: Annotated[str, Field(max_length=256)] | None = None
    """Only null or the run's id."""
    request_id: Annotated[str, Field(max_length=256)] | None = None
    """Returned as it is. Default: one made up."""
    output_mode: Literal["tokens"] = "tokens"
    """Only tokens: POST /v1/rollouts and a session's OpenAI endpoint give texts."""
    return_token_ids: bool | None = None
    """Whether the answer repeats the prompt."""
    stream: Literal[False] | None = None
    """Only false."""
    stream_options: None = None
    """Only null."""
    priority: Annotated[int, Field(ge=0, le=0)] = 0
    """Only 0."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Has no effect: cached prefixes live as long as the weights that computed them."""
    features: None = None
    """Only null: prompts are tokens, without images."""
    content_parts: None = None
    """Only null, for the same reason."""
    kv_transfer_params: None = None
    """Only null."""
    ec_transfer_params: None = None
    """Only null."""

    @property
    def drawn(self) -> GenerateSampling:
        return self.sampling_params

    def to_rollout(self, context_length: int) -> RolloutRequest:
        """The same request without a session."""
        drawn = self.sampling_params
        given = drawn.model_dump(include={"temperature", "min_p", "seed", "stop_token_ids"}, exclude_none=True)
        sampling = SamplingBody(**given, max_tokens=drawn.limit or min(context_length, MAX_NEW_TOKENS), stop=drawn.stop)
        return RolloutRequest(prompt_ids=self.token_ids, n=drawn.n, sampling=sampling, return_text=False)


class GeneratedLogprob(Body):
    """One token drawn."""

    token_id: int
    """Its id, as vLLM tells it."""
    token: str
    """"token_id:" and its id, as vLLM's older clients read it."""
    logprob: float
    """Natural log-probability under the constrained policy."""
    top_logprobs: tuple[()] = ()
    """Always empty."""


class GeneratedLogprobs(Body):
    """All tokens drawn."""

    content: list[GeneratedLogprob]
    """In order."""

    @classmethod
    def of(cls, sample: Sample) -> GeneratedLogprobs:
        pairs = zip(sample.token_ids.tolist(), sample.logprobs.tolist(), strict=True)
        return cls(content=[GeneratedLogprob(token_id=i, token=f"token_id:{i}", logprob=value) for i, value in pairs])


class GeneratedChoice(Body):
    """One sample."""

    index: int
    """Which of the n."""
    token_ids: TokenIds
    """What the model drew, with a final end of sequence and every token of a stop string."""
    logprobs: GeneratedLogprobs | None = None
    """null unless they were asked for."""
    kept_mass: Numbers
    """Probability, in (0, 1], that the unconstrained policy gives to the safe set at each position."""
    kept_count: Counts
    """Number of tokens in the safe set at each position."""
    finish_reason: FinishReason
    """stop or length."""
    weight_versions: tuple[VersionSpan, ...]
    """Which weights drew which tokens."""

    @classmethod
    def of(cls, index: int, sample: Sample, *, logprobs: bool) -> GeneratedChoice:
        plain = sample.model_dump(mode="json", include={"token_ids", "kept_mass", "kept_count", "finish_reason"})
        told = GeneratedLogprobs.of(sample) if logprobs else None
        return cls(index=index, logprobs=told, weight_versions=sample.versions, **plain)


class GenerateResponse(Body):
    """Tokens that were drawn."""

    model_config = example(
        request_id="9b2f0f6d",
        created=1795855048,
        model="default",
        output_mode="tokens",
        usage={"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9},
        choices=[
            {
                "index": 0,
                "token_ids": [28, 24, 2],
                "logprobs": None,
                "kept_mass": [0.9999, 0.9998, 1.0],
                "kept_count": [31, 40, 12],
                "finish_reason": "stop",
                "weight_versions": [{"version": "default:0:26c3b9c3533dd897", "start": 0, "end": 3}],
            }
        ],
    )

    request_id: str
    """The request's, or one made up."""
    created: int
    """Unix time in seconds."""
    model: str
    """The run's id."""
    output_mode: Literal["tokens"] = "tokens"
    """Always tokens."""
    prompt_token_ids: TokenIds | None = None
    """The prompt, if return_token_ids."""
    usage: Usage
    """How many tokens it took."""
    recording: Recording | None = None
    """What the session recorded; null without a session."""
    choices: tuple[GeneratedChoice, ...]
    """All n samples."""
