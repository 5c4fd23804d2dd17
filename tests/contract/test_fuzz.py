"""Arbitrary input is refused with this project's error, or is a record that both codecs carry."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from dvp_rl.contract import http
from dvp_rl.contract.errors import RequestError
from dvp_rl.contract.group import DeadLetter
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.record import SCHEMA_VERSION, Record
from dvp_rl.contract.weights import Announcement, Manifest, WeightFile
from dvp_rl.monitor.bodies import Selection
from tests.kit.records import make_group
from tests.kit.strategies import damages

RUN = "run"
JOB = Job(
    job_id="a",
    run_id=RUN,
    prompt_ids=[1, 2],
    n=2,
    sink=Sink.TRAIN,
    metadata={"a": [1, {"b": None}], "c": "d"},
    sampling={"stop": ["x"], "stop_token_ids": [3], "seed": 4},
)
RECORDS: tuple[Record, ...] = (
    JOB,
    make_group(JOB).model_copy(update={"metadata": JOB.metadata}),
    DeadLetter(job_id="a", run_id=RUN, sink=Sink.EVAL, error="boom", deliveries=1, replica_id="r", died_at=1.0),
    Announcement(version=f"{RUN}:1:ab", step=1, folder="/w", min_seq=1, announced_at=1.0),
    Manifest(run_id=RUN, seq=1, step=1, files=(WeightFile(name="a", size=1, sha256="0" * 64),)),
)
GROUP = make_group(JOB)
RESPONSE = http.RolloutResponse(
    **GROUP.model_dump(mode="json", include={"job_id", "run_id", "prompt_ids", "engine", "metadata"}),
    samples=tuple(http.SampleBody.of(sample, text) for sample, text in zip(GROUP.samples, ("a", None), strict=True)),
)
BODIES: tuple[tuple[type[BaseModel], dict[str, Any]], ...] = (
    (http.RolloutRequest, {"prompt": "1", "n": 2, "sampling": {"stop": ["x"], "seed": 1}, "metadata": {"a": [1]}}),
    (http.RolloutRequest, {"prompt_ids": [1, 2], "return_text": False}),
    (http.JobRequest, {"messages": [{"role": "user", "content": "hi"}], "job_id": "a", "deadline_s": 60}),
    (Selection, {"entry_ids": ["1-0", "2-0"]}),
    (http.Problem, {"title": "t", "status": 400, "detail": "d", "errors": [{"field": "f", "allowed": "a"}]}),
    (http.JobStatus, {"status": "done", "group": RESPONSE.model_dump(mode="json")}),
)
MAX_GROWTH = 256 * 2**20
NESTED: Any = [[]]
for _ in range(600):
    NESTED = [NESTED]
ANYWHERE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64 - 1, 1e308, -0.0, 1e-320, "", "a", "a\n", "\x00", "é"),
    *([], {}, [[]], {"": {}}, [0] * 70, {str(i): i for i in range(70)}, NESTED, "x" * 20_000),
)
BINARY: tuple[Any, ...] = (*ANYWHERE, float("nan"), float("inf"), b"", b"\xff", b"\x00" * 8, msgpack.ExtType(5, b"x"))
TEXTUAL: tuple[Any, ...] = (*ANYWHERE, float("nan"), float("-inf"), "\ud800", 2**70, 10**400, {"\udfff": 1})

Case = Callable[[], None]


def _replaced(value: Any, way: list[int], hostile: Any) -> Any:
    """A copy in which `hostile` replaces, or is added beside, the part that `way` leads to."""
    if not way or not isinstance(value, (dict, list, tuple)) or not value:
        return hostile
    step, *rest = way
    if isinstance(value, dict):
        keys = list(value)
        key = keys[step % len(keys)] if step % (len(keys) + 1) else f"new{step}"
        return {**value, key: _replaced(value.get(key), rest, hostile)}
    items = list(value)
    items[step % len(items)] = _replaced(items[step % len(items)], rest, hostile)
    return items


WAYS = st.lists(st.integers(0, 60), max_size=4)
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],
}


def _survives(kind: type[Record], data: bytes) -> None:
    try:
        record = kind.from_bytes(data)
    except RequestError:
        return
    assert kind.from_bytes(record.to_bytes()) == record
    record.model_dump_json()


def _fuzz_msgpack(count: int) -> int:
    made = 0
    packed = [(type(record), record.to_bytes()) for record in RECORDS]
    fields = [(type(record), msgpack.unpackb(record.to_bytes())) for record in RECORDS]

    @settings(max_examples=count // 2, **SETTINGS)
    @given(st.sampled_from(packed), damages())
    def damaged(record: tuple[type[Record], bytes], damage: Callable[[bytes], bytes]) -> None:
        nonlocal made
        made += 1
        _survives(record[0], damage(record[1]))

    @settings(max_examples=count - count // 2, **SETTINGS)
    @given(st.sampled_from(fields), WAYS, st.sampled_from(BINARY))
    def rebuilt(record: tuple[type[Record], Any], way: list[int], hostile: Any) -> None:
        nonlocal made
        try:
            data = msgpack.packb(_replaced(record[1], [1, *way], hostile))
        except ValueError:
            return  # too deep for msgpack
        made += 1
        _survives(record[0], data)

    damaged()
    rebuilt()
    return made


def _fuzz_json(count: int) -> int:
    """Covers both ways of parsing JSON: by the standard library (FastAPI), and by pydantic (the client)."""
    made = 0

    @settings(max_examples=count // 2, **SETTINGS)
    @given(st.sampled_from(BODIES), WAYS, st.sampled_from(TEXTUAL))
    def rebuilt(body: tuple[type[BaseModel], Any], way: list[int], hostile: Any) -> None:
        nonlocal made
        kind, text = body[0], json.dumps(_replaced(body[1], way, hostile))
        for parse in (lambda: kind.model_validate(json.loads(text)), lambda: kind.model_validate_json(text)):
            made += 1
            with suppress(ValidationError):
                parse()

    rebuilt()
    return made


def _bounded(fuzz: Callable[[int], int], count: int) -> int:
    process = psutil.Process()
    before = process.memory_info().rss
    made = fuzz(count)
    assert process.memory_info().rss - before < MAX_GROWTH
    return made


@pytest.mark.parametrize("fuzz", [_fuzz_msgpack, _fuzz_json])
def test_hundreds_of_records(fuzz: Callable[[int], int]) -> None:
    _bounded(fuzz, 600)


@pytest.mark.long
def test_a_hundred_thousand_records(record_cases: Any) -> None:
    counts = {"msgpack": _bounded(_fuzz_msgpack, 60_000), "JSON": _bounded(_fuzz_json, 50_000)}
    for name, count in counts.items():
        record_cases(name, count)
    assert sum(counts.values()) >= 100_000


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdc\xff\xff" * 20_000,
        b"\x91" * 10**6,
        b"\x81\xa1a" * 10**5,
        b"\x92\x01" + b"\xdd\x00\xff\xff\xff" + b"\xc0" * (2**16 - 1),
    ],
    ids=lambda bomb: bomb[:6].hex(),
)
def test_a_small_bomb_stays_small(bomb: bytes) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    with pytest.raises(RequestError, match="Job"):
        Job.from_bytes(bomb)
    assert process.memory_info().rss - before < MAX_GROWTH


@pytest.mark.parametrize(
    "metadata",
    [{"a": 2**64}, {"a": "\ud800"}, {"\ud800": 1}, {"a": b"\xff"}, {"a": NESTED}, {"a": float("inf")}],
    ids=["70 bits", "surrogate", "surrogate in a key", "bytes", "deep", "infinite"],
)
def test_metadata_is_what_both_codecs_carry(metadata: dict[str, Any]) -> None:
    for record in RECORDS[:2]:
        with pytest.raises(ValidationError, match="metadata"):
            type(record).model_validate(record.model_dump() | {"metadata": metadata})


def test_a_replicas_metadata_is_checked_like_a_clients() -> None:
    fields = make_group(JOB).model_dump() | {"metadata": {"a": b"\xff"}}
    packed = msgpack.packb([SCHEMA_VERSION, fields], default=lambda array: array.tobytes())
    with pytest.raises(RequestError, match="Group: metadata"):
        type(RECORDS[1]).from_bytes(packed)
