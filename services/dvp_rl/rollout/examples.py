"""What the OpenAPI document shows of requests and refusals, and what callers of other servers' paths are told."""

from __future__ import annotations

from typing import Any

from dvp_rl.contract.errors import EngineError, NotFoundError, RequestError, UnavailableError, WeightError
from dvp_rl.contract.http import MAX_EPISODE_WAIT_S
from dvp_rl.contract.job import MAX_DEADLINE_S, MAX_SAMPLES
from dvp_rl.http.openapi import wrong
from dvp_rl.transport.jobs import MAX_ERROR_CHARS
from dvp_rl.transport.sessions import ENDED
from dvp_rl.transport.sessions import UNKNOWN as NO_SUCH_SESSION
from dvp_rl.transport.submission import UNKNOWN

from .service import NO_REDIS, STILL_LOADING

EXAMPLES: dict[str, Any] = {
    "text": {
        "summary": "Four samples of a text",
        "value": {"prompt": "37+58=", "n": 4, "sampling": {"min_p": 0.05, "max_tokens": 6, "seed": 1}},
    },
    "conversation": {
        "summary": "A conversation, for models with a chat template",
        "value": {"messages": [{"role": "user", "content": "What is 37+58?"}], "sampling": {"max_tokens": 64}},
    },
    "token ids": {
        "summary": "Token ids, greedily, without text",
        "value": {
            "prompt_ids": [22, 26, 14, 24, 27, 32],
            "sampling": {"temperature": 0, "max_tokens": 6},
            "return_text": False,
        },
    },
}
JOB_EXAMPLES = {
    name: {"summary": example["summary"], "value": {**example["value"], "deadline_s": 600}}
    for name, example in EXAMPLES.items()
}

SESSION_EXAMPLES: dict[str, Any] = {
    "episode": {
        "summary": "An episode of several turns",
        "value": {"sampling": {"temperature": 1.0, "max_tokens": 64}, "metadata": {"row": 7}},
    },
}
CHAT_EXAMPLES: dict[str, Any] = {
    "first turn": {
        "summary": "The first turn of a conversation",
        "value": {"model": "default", "messages": [{"role": "user", "content": "What is 37+58?"}]},
    },
}
COMPLETION_EXAMPLES: dict[str, Any] = {
    "first turn": {"summary": "The first turn of a text", "value": {"model": "default", "prompt": "37+58="}},
}
GENERATE_EXAMPLES: dict[str, Any] = {
    "token ids": {
        "summary": "Two samples with log-probabilities",
        "value": {
            "token_ids": [22, 26, 14, 24, 27, 32],
            "sampling_params": {"n": 2, "max_tokens": 6, "seed": 1, "logprobs": 1},
        },
    },
}

LOADING = UnavailableError(STILL_LOADING.format("/models/qwen3"))
NO_QUEUE = UnavailableError(NO_REDIS)
NO_JOB = NotFoundError(UNKNOWN.format("job-1"))
BAD_N = wrong("n", 0, f"integer in [1, {MAX_SAMPLES}]")
NOT_YOURS = RequestError(
    "job qwen3-math:000000007:0 is the trainer's; only what was submitted over HTTP can be deleted"
)
NO_SESSION = NotFoundError(NO_SUCH_SESSION.format("37+58-row-7"))
NO_MODEL = NotFoundError("model 'gpt': this replica has only 'qwen3-math', the run's id")
SESSION_ENDED = RequestError(ENDED.format("37+58-row-7"))
NO_TURN = RequestError("session '37+58-row-7' has no turn to be finished: delete it")
LONG_ERROR = wrong("error", "no sandbox, no sandbox, ...", f"at most {MAX_ERROR_CHARS} characters")
LONG_WAIT = wrong("wait_s", 600, f"number in [0, {MAX_EPISODE_WAIT_S:g}]")
NO_IDLE = wrong("idle_s", 0, f"number in (0, {MAX_DEADLINE_S}]")
NOT_ONLY_MIN_P = wrong("top_p", 0.9, "only 1")
NOT_GENERATED = EngineError("4 samples took longer than 3600 s")
NOT_LOADED = WeightError("qwen3-math:13:0f6e8d6d2a9b4c11: /weights/13: No such file or directory")

OPENAI = "OpenAI's routes are those of a session: POST /v1/sessions opens one, and its base_url is /v1/sessions/ID/v1;"
CHAT = f'{OPENAI} without one, POST /v1/rollouts takes {{"messages": [{{"role": "user", "content": "..."}}]}};'
PROMPT = f'{OPENAI} without one, POST /v1/rollouts takes {{"prompt": "..."}};'
MODELS = "GET /v1/models names the run that this replica serves, GET /v1/weights its weights;"
HEALTH = "GET /readyz answers 200 if this replica can do its work, /healthz if its process runs;"
HINTS = {
    "/v1/chat/completions": CHAT,
    "/chat/completions": CHAT,
    "/v1/responses": CHAT,
    "/responses": CHAT,
    "/v1/messages": CHAT,
    "/api/chat": CHAT,
    "/v1/completions": PROMPT,
    "/completions": PROMPT,
    "/generate": PROMPT,
    "/api/generate": PROMPT,
    "/models": MODELS,
    "/health": HEALTH,
    "/v1/health": HEALTH,
    "/ping": HEALTH,
}
"""Paths that clients of other servers try first."""
