"""Records survive both codecs unchanged; damaged bytes are refused with a message, never with a crash."""

from __future__ import annotations

import base64
import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dvp_rl.contract.errors import RequestError
from dvp_rl.contract.group import Group, Sample
from dvp_rl.contract.job import Job, Sink, job_id, job_position
from dvp_rl.contract.record import SCHEMA_VERSION, Record
from dvp_rl.contract.weights import WeightVersion
from tests.kit.records import make_turns
from tests.kit.strategies import GROUPS, JOBS, PLAIN_GROUPS, RECORDS, STRATEGIES, Damage, damages

JOB = Job(job_id="a", run_id="run", prompt_ids=[1, 2], sink=Sink.TRAIN)


def test_every_record_has_a_strategy() -> None:
    nested = {"VersionSpan", "EnvironmentSpan"}
    assert {cls.__name__ for cls in Record.__subclasses__()} == {cls.__name__ for cls in STRATEGIES} | nested


@given(RECORDS)
def test_msgpack_round_trip(record: Record) -> None:
    assert type(record).from_bytes(record.to_bytes()) == record


@given(RECORDS)
def test_json_round_trip(record: Record) -> None:
    assert type(record).model_validate_json(record.model_dump_json()) == record


@given(GROUPS)
def test_arrays_are_read_only(group: Group) -> None:
    copy = Group.from_bytes(group.to_bytes())
    for array in (copy.prompt_ids, copy.samples[0].logprobs, copy.samples[0].kept_count):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@settings(max_examples=150)
@given(st.one_of(JOBS, GROUPS), damages())
def test_damaged_bytes_are_refused_or_still_a_record(record: Record, damage: Damage) -> None:
    with contextlib.suppress(RequestError):
        assert isinstance(type(record).from_bytes(damage(record.to_bytes())), type(record))


@settings(max_examples=400)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(msgpack.packb([SCHEMA_VERSION, None]))
@example(msgpack.packb([SCHEMA_VERSION, {}, 3]))
@example(b"\x91" * 2000)
def test_junk_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError, match="Job"):
        Job.from_bytes(data)


@given(PLAIN_GROUPS, st.data())
def test_no_group_is_larger_than_its_job_said(group: Group, data: st.DataObject) -> None:
    longest = max(len(sample.token_ids) for sample in group.samples)
    sampling = group.sampling.model_copy(update={"max_tokens": longest + data.draw(st.integers(0, 3))})
    group = group.model_copy(update={"sampling": sampling})
    names = ("job_id", "run_id", "prompt_ids", "sampling", "sink", "metadata")
    job = Job(**{name: getattr(group, name) for name in names}, n=len(group.samples))
    assert len(group.to_bytes()) <= job.max_bytes
    assert len(job.to_bytes()) <= job.max_bytes


def test_another_schema_version_is_refused() -> None:
    with pytest.raises(RequestError, match="schema version 99, this build reads 1"):
        Job.from_bytes(msgpack.packb([99, {}]))


def test_an_unknown_field_is_refused_by_name() -> None:
    fields = {"job_id": "a", "run_id": "run", "prompt_ids": [1], "sink": "train", "top_k": 5}
    with pytest.raises(RequestError, match="top_k"):
        Job.from_bytes(msgpack.packb([SCHEMA_VERSION, fields]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("job_id", "a b", "job_id"),
        ("job_id", "a\n", "job_id"),
        ("run_id", "a{b}", "run_id"),
        ("prompt_ids", [], "at least one token"),
        ("prompt_ids", [-1], "at least one token"),
        ("prompt_ids", [2**31], "must lie in"),
        ("prompt_ids", [[1]], "flat list"),
        ("prompt_ids", b"\x00\x01\x02", "whole number"),
        ("n", 0, "greater than or equal to 1"),
        ("sink", "nobody", "sink"),
        ("metadata", {"x": "y" * 20_000}, "at most"),
        ("metadata", {"x": float("nan")}, "JSON"),
        ("sampling", {"temperature": 0.0}, "temperature"),
        ("sampling", {"log_min_p": 0.5}, "log_min_p"),
        ("sampling", {"log_min_p": float("nan")}, "log_min_p"),
    ],
)
def test_bad_job_fields_are_named(field: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Job.model_validate(JOB.model_dump() | {field: value})


def test_float32_values_survive_json_exactly() -> None:
    values = np.array([-0.1, -1 / 3, -1e-30], np.float32)
    sample = {
        "token_ids": [1, 2, 3],
        "logprobs": values,
        "kept_mass": [1.0, 0.5, 0.1],
        "kept_count": [1, 2, 3],
        "finish_reason": "stop",
        "versions": [{"version": "run:0:ab", "start": 0, "end": 3}],
        "seed": 0,
    }
    copy = Sample.model_validate_json(Sample.model_validate(sample).model_dump_json())
    assert copy.logprobs.tobytes() == values.tobytes()


TURNS = make_turns([([7, 8], [-0.5, -0.25]), ([5, 5, 5], None), ([9], [-1.0])])
SAMPLE_FIELDS = TURNS.model_dump()


def test_environment_tokens_have_no_facts() -> None:
    assert (len(TURNS.token_ids), TURNS.num_model_tokens) == (6, 3)
    assert TURNS.is_model.tolist() == [True, True, False, False, False, True]
    assert TURNS.token_ids[TURNS.is_model].tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"environment": [{"start": 2, "end": 4}]},
            r"cover \[0, 6\) without gap or overlap: \[5, 6\) follows token 4",
        ),
        ({"environment": [{"start": 1, "end": 5}]}, "without gap or overlap"),
        ({"environment": [{"start": 2, "end": 5}, {"start": 5, "end": 5}]}, "without gap or overlap"),
        ({"environment": []}, "without gap or overlap"),
        ({"versions": SAMPLE_FIELDS["versions"][:1]}, r"cover \[0, 6\) without gap or overlap: the last one ends at 5"),
        (
            {
                "token_ids": [7, 8, 5, 5, 5, 9, 1],
                "environment": [*SAMPLE_FIELDS["environment"], {"start": 6, "end": 7}],
            },
            "a model's",
        ),
        ({"versions": SAMPLE_FIELDS["versions"][1:], "environment": [{"start": 0, "end": 5}]}, "must be a model's"),
        ({"logprobs": [-1.0] * 6}, "one entry for each of the 3 model tokens, got {'logprobs': 6"),
        ({"prompt_ids": []}, "prompt_ids needs at least one token"),
        ({"prompt_ids": [-1]}, "prompt_ids needs at least one token"),
    ],
)
def test_segments_that_do_not_fit_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Sample.model_validate(SAMPLE_FIELDS | fields)


@given(GROUPS)
def test_the_samples_of_a_group_are_those_of_its_episodes(group: Group) -> None:
    assert [sample for episode in group.episodes for sample in episode] == list(group.samples)
    assert tuple(map(len, group.episodes)) == (group.episode_sizes or (1,) * len(group.samples))
    with pytest.raises(ValidationError, match=f"do not add up to {len(group.samples)} samples"):
        Group.model_validate(group.model_dump() | {"episode_sizes": (len(group.samples) + 1,)})


def test_a_group_stored_before_there_were_segments_is_read() -> None:
    group = Group.from_bytes(base64.b64decode(OLD_GROUP))
    assert [sample.token_ids.tolist() for sample in group.samples] == [[7, 1]] * 2
    assert [sample.is_model.tolist() for (sample,) in group.episodes] == [[True, True]] * 2


OLD_GROUP = """
kgGLpmpvYl9pZKVyOjE6MKZydW5faWShcqpwcm9tcHRfaWRzxAgFAAAABgAAAKhzYW1wbGluZ4apbG9nX21pbl9wy8AqAAAAAAAAq3RlbXBlcmF0dXJl
yz/wAAAAAAAAqm1heF90b2tlbnMCpHN0b3CQrnN0b3BfdG9rZW5faWRzkKRzZWVkwKdzYW1wbGVzkoepdG9rZW5faWRzxAgHAAAAAQAAAKhsb2dwcm9i
c8QIAAAAvwAAgL6pa2VwdF9tYXNzxAgAAAA/AACAP6prZXB0X2NvdW50xAgDAAAAAQAAAK1maW5pc2hfcmVhc29upHN0b3CodmVyc2lvbnOSg6d2ZXJz
aW9upnI6NDphYqVzdGFydACjZW5kAYOndmVyc2lvbqZyOjU6Y2Slc3RhcnQBo2VuZAKkc2VlZAmHqXRva2VuX2lkc8QIBwAAAAEAAACobG9ncHJvYnPE
CAAAAL8AAIC+qWtlcHRfbWFzc8QIAAAAPwAAgD+qa2VwdF9jb3VudMQIAwAAAAEAAACtZmluaXNoX3JlYXNvbqRzdG9wqHZlcnNpb25zkoOndmVyc2lv
bqZyOjQ6YWKlc3RhcnQAo2VuZAGDp3ZlcnNpb26mcjo1OmNkpXN0YXJ0AaNlbmQCpHNlZWQJpHNpbmuldHJhaW6qcmVwbGljYV9pZKFhpmVuZ2luZYWk
bmFtZaRmYWtlp3ZlcnNpb26hMaVkdHlwZadmbG9hdDMyqWZwMzJfaGVhZMKsbG9ncHJvYl9raW5kq2NvbnN0cmFpbmVkqG1ldGFkYXRhgKpnZW5lcmF0
ZV9zywAAAAAAAAAAq2ZpbmlzaGVkX2F0ywAAAAAAAAAA
"""
"""`Group.to_bytes` of 27 November 2026."""


@pytest.mark.parametrize("value", [np.float32(1), np.int64(1), object()])
def test_nothing_but_arrays_is_stored_raw(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        JOB.model_copy(update={"metadata": {"a": value}}).to_bytes()


@given(st.integers(0, 10**9 - 1), st.integers(0, 10**6))
def test_job_ids_are_a_function_of_position_and_attempt(position: int, attempt: int) -> None:
    assert job_position(job_id("run-1", position, attempt)) == (position, attempt)


def test_a_foreign_job_id_is_refused() -> None:
    with pytest.raises(ValueError, match="run_id:position:attempt"):
        job_position("mine")


@given(st.integers(0, 2**60))
def test_weight_version_round_trip(seq: int) -> None:
    version = WeightVersion("run-1", seq, "00ff")
    assert WeightVersion.parse(str(version)) == version
