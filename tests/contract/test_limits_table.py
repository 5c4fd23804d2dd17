"""The tables of limits in the READMEs match the code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from dvp_rl.contract.http import MAX_BODY_BYTES, MAX_EPISODE_WAIT_S, MAX_FIELDS, MAX_PROMPT_CHARS, RolloutRequest
from dvp_rl.contract.job import (
    IDLE_S,
    MAX_DEADLINE_S,
    MAX_GROUP_TOKENS,
    MAX_METADATA_BYTES,
    MAX_METADATA_DEPTH,
    MAX_SAMPLES,
    MAX_TASK_BYTES,
)
from dvp_rl.contract.sampling import Sampling
from dvp_rl.contract.session import MAX_SESSION_BYTES
from dvp_rl.http.connections import MAX_HEAD_BYTES, MIN_READ_BYTES, READ_TIMEOUT_S, REQUEST_TIMEOUT_S
from dvp_rl.http.guard import BODY_TIMEOUT_S
from dvp_rl.http.server import MIN_CONNECTIONS, OTHER_FILES, WANTED_FILES
from dvp_rl.http.settings import MAX_REQUESTS
from dvp_rl.logs import ALIKE_S, MAX_ALIKE
from dvp_rl.rollout.admission import RETRY_AFTER_S
from dvp_rl.rollout.answers import RETRY_AFTER_S as RETRY_AFTER_ROOM_S
from dvp_rl.rollout.answers import SEND_TIMEOUT_S, WAIT_S
from dvp_rl.rollout.canary import LEARNED, LIMITS, LOW_LIMITS
from dvp_rl.rollout.service import MAX_RESULTS_BYTES
from dvp_rl.rollout.settings import RolloutSettings
from dvp_rl.transport.broker import (
    CLIENT_MEMORY_SHARE,
    CLIENT_SHARE,
    MEMORY_SHARE,
    RESULT_SHARE,
    RESULT_TTL_S,
    RETRY_AFTER_MEMORY_S,
)
from dvp_rl.transport.submission import RETRY_AFTER_BACKLOG_S, RETRY_AFTER_CLOSED_S
from dvp_trainer.config import BatchSection, CheckpointSection
from dvp_trainer.learn.canary import PROMPTS

SERVICES = Path(__file__).parents[2] / "services" / "dvp_rl"


def default(name: str) -> int:
    value = RolloutSettings.model_fields[name].default
    assert isinstance(value, int)
    return value


def longest(model: type, name: str) -> int:
    found = [m.max_length for m in model.model_fields[name].metadata if hasattr(m, "max_length")]  # type: ignore[attr-defined]
    return int(found[0])


def busy(seconds: float) -> str:
    return f"429, Retry-After {seconds:.0f}"


def table() -> str:
    messages = RolloutRequest.model_json_schema()["properties"]["messages"]["anyOf"][0]["maxItems"]
    tokens = Sampling.model_json_schema()["properties"]["max_tokens"]["maximum"]
    in_flight = "batch.groups x (1 + batch.max_staleness)"
    batch, checkpoint = BatchSection(), CheckpointSection()
    memory = "of its maxmemory"
    batch_size, waiting = default("max_batch"), default("max_waiting")
    share = RolloutSettings.model_fields["client_share"].default
    requests = f"max_batch + max_waiting: {batch_size} + {waiting}; with a trainer {share * batch_size:.0f} + {waiting}"
    results = f"waits {WAIT_S:.0f} s, then {busy(RETRY_AFTER_ROOM_S)}"
    num_in_flight = batch.groups * (1 + batch.max_staleness)
    rows = [
        ("Body", f"{MAX_BODY_BYTES >> 20} MiB", "413, before it is parsed"),
        ("", f"arrives within {BODY_TIMEOUT_S:.0f} s", "408"),
        ("Fields of one object", f"{MAX_FIELDS}", "422"),
        ("Prompt", f"{MAX_PROMPT_CHARS:,} characters, {messages:,} messages", "422"),
        ("", "the model's context minus one token", "422"),
        ("n", f"{MAX_SAMPLES:,} samples", "422"),
        ("sampling.max_tokens", f"{tokens:,}, and limited by the context", "422"),
        ("n x new tokens", f"{MAX_GROUP_TOKENS:,}", "422; a trainer with such settings does not start"),
        ("sampling.stop, stop_token_ids", f"{longest(Sampling, 'stop')}, {longest(Sampling, 'stop_token_ids')}", "422"),
        ("metadata", f"{MAX_METADATA_BYTES >> 10} KiB as JSON, {MAX_METADATA_DEPTH} levels", "422"),
        ("Concurrent requests", f"max_requests: {default('max_requests')}", busy(1)),
        ("Samples of requests that generate or wait", requests, busy(RETRY_AFTER_S)),
        ("Samples of clients that generate, with a trainer", f"client_share of max_batch: {share:.0%}", "they wait"),
        ("Jobs of clients that wait unread", f"max_queued: {default('max_queued'):,}", busy(RETRY_AFTER_BACKLOG_S)),
        ("deadline_s of POST /v1/jobs", f"{MAX_DEADLINE_S // 86_400} days", "422"),
        ("Queue closed by `dvp-queue drain`", "no new jobs", busy(RETRY_AFTER_CLOSED_S)),
        ("Broker's memory, new training jobs", f"{MEMORY_SHARE:.0%} {memory}", "the trainer waits"),
        ("Broker's memory, POST /v1/jobs", f"{CLIENT_MEMORY_SHARE:.0%} {memory}", busy(RETRY_AFTER_MEMORY_S)),
        ("Memory of all jobs of POST /v1/jobs, at most", f"{CLIENT_SHARE:.0%} {memory}", busy(RETRY_AFTER_MEMORY_S)),
        ("Memory of one such job, at most", f"{CLIENT_SHARE:.0%} {memory}; half of it for a named caller", "422"),
        ("Broker's memory, results of POST /v1/jobs", f"{RESULT_SHARE:.0%} {memory}", "the job is a dead letter"),
        ("Results of POST /v1/jobs", f"kept {RESULT_TTL_S // 60} minutes, or until they are deleted", "404"),
        ("Results of POST /v1/jobs that are read concurrently", f"{MAX_RESULTS_BYTES >> 20} MiB", results),
        (
            "Prompts and answers kept by the transformers engine",
            f"prefix_cache_mib: {default('prefix_cache_mib')} MiB",
            "later turns read them again",
        ),
        ("Turns of one session", f"{MAX_SESSION_BYTES >> 20} MiB as stored; of an episode, the n-th part", "422"),
        ("Broker's memory, POST /v1/episodes", f"{MEMORY_SHARE:.0%} of its maxmemory", busy(RETRY_AFTER_MEMORY_S)),
        ("Broker's memory, turns of episodes", f"{RESULT_SHARE:.0%} of its maxmemory", busy(RETRY_AFTER_MEMORY_S)),
        ("Task of an episode", f"{MAX_TASK_BYTES >> 20} MiB as JSON", "the trainer stops and names the row"),
        ("wait_s of POST /v1/episodes", f"{MAX_EPISODE_WAIT_S:g} s", "422"),
        ("Sessions", "count as results, in the same limits", busy(RETRY_AFTER_MEMORY_S)),
        (
            "Time without a turn or heartbeat of a session",
            f"idle_s: {IDLE_S:,.0f} s, up to {MAX_DEADLINE_S // 86_400} days",
            "404",
        ),
        ("Share of one named caller in each limit answered with 429", "no more than it leaves free", "429"),
        ("Time to send an answer with samples", f"{SEND_TIMEOUT_S:.0f} s", "closed"),
        ("Training jobs in flight", f"{in_flight}: {num_in_flight}", "the trainer waits"),
        ("Trained groups in the broker", f"checkpoint.interval: {checkpoint.interval} batches", "a checkpoint"),
    ]  # fmt: skip
    return markdown(rows)


def table_of_connections() -> str:
    head, read = f"{MAX_HEAD_BYTES >> 10} KiB", f"{MIN_READ_BYTES >> 10} KiB"
    fewest = MIN_CONNECTIONS + OTHER_FILES
    rows = [
        ("Requests that are answered concurrently", f"max_requests: {MAX_REQUESTS}", f"{busy(1)}; probes are answered"),
        ("Of these, from one caller of scope `read`, `rollout` or `harness`", "no more than it leaves free", busy(1)),
        ("Connections", f"twice as many: {2 * MAX_REQUESTS:,}", "the one that has been idle longest is closed"),
        ("Time for a request's line and headers", f"{REQUEST_TIMEOUT_S:.0f} s", "closed"),
        ("Their size", head, "431, or 400 if they do not end"),
        ("Time for a request's body", f"{BODY_TIMEOUT_S:.0f} s", "408"),
        (f"Time to read {read} of an answer, or all of it", f"{READ_TIMEOUT_S:.0f} s", "closed"),
        ("Log lines about strangers with the same beginning", f"{MAX_ALIKE} in {ALIKE_S:.0f} s", "counted"),
        ("Open files", f"raised to {WANTED_FILES:,}", f"fewer connections; below {fewest:,} the server does not start"),
    ]  # fmt: skip
    return markdown(rows)


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| What | Limit, defaults of settings | Beyond it |", "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


@pytest.mark.parametrize(("package", "expected"), [("rollout", table()), ("http", table_of_connections())])
def test_the_table_of_limits_is_true(package: str, expected: str) -> None:
    readme = SERVICES / package / "README.md"
    assert expected in readme.read_text(), f"{readme} should say\n\n{expected}"


def test_the_table_of_canaries_matches_the_code() -> None:
    text = (SERVICES / "rollout" / "README.md").read_text()
    rows = {dtype: LIMITS[dtype] for dtype in ("float32", "float16")} | {"bfloat16 and less precise ones": LOW_LIMITS}
    for dtype, limits in rows.items():
        assert f"| {dtype} | {limits.least:g} to {limits.most:g} |" in text
    assert f"{LEARNED:g} times the mean difference" in text
    assert len(PROMPTS) == 8, "eight short prompts"
