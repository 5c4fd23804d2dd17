"""What the OpenAPI document shows of requests and refusals, and what callers of other servers' paths are told."""

from __future__ import annotations

from typing import Any

from dvp_rl.contract.errors import EngineError, NotFoundError, RequestError, UnavailableError, WeightError
from dvp_rl.contract.job import MAX_SAMPLES
from dvp_rl.http.openapi import wrong
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

LOADING = UnavailableError(STILL_LOADING.format("/models/qwen3"))
NO_QUEUE = UnavailableError(NO_REDIS)
NO_JOB = NotFoundError(UNKNOWN.format("job-1"))
BAD_N = wrong("n", 0, f"integer in [1, {MAX_SAMPLES}]")
NOT_YOURS = RequestError(
    "job qwen3-math:000000007:0 is the trainer's; only what was submitted over HTTP can be deleted"
)
NOT_GENERATED = EngineError("4 samples took longer than 3600 s")
NOT_LOADED = WeightError("qwen3-math:13:0f6e8d6d2a9b4c11: /weights/13: No such file or directory")

OWN = "this server has its own API, not OpenAI's: POST /v1/rollouts takes {} and returns samples;"
MESSAGES = OWN.format('{"messages": [{"role": "user", "content": "..."}]}')
PROMPT = OWN.format('{"prompt": "..."}')
MODELS = "GET /v1/weights names the weights that are served;"
HEALTH = "GET /readyz answers 200 if this replica can do its work, /healthz if its process runs;"
HINTS = {
    "/v1/chat/completions": MESSAGES,
    "/chat/completions": MESSAGES,
    "/v1/responses": MESSAGES,
    "/responses": MESSAGES,
    "/v1/messages": MESSAGES,
    "/api/chat": MESSAGES,
    "/v1/completions": PROMPT,
    "/completions": PROMPT,
    "/generate": PROMPT,
    "/api/generate": PROMPT,
    "/v1/models": MODELS,
    "/models": MODELS,
    "/health": HEALTH,
    "/v1/health": HEALTH,
    "/ping": HEALTH,
}
"""Paths that clients of other servers try first."""
