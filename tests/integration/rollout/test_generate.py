"""vLLM's token wire over real sockets, with the client that other trainers use: what it reads, and what is recorded."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from renderers.base import create_renderer
from renderers.client import generate
from renderers.configs import DefaultRendererConfig
from transformers import AutoTokenizer

from dvp_rl.contract.openai import ErrorBody, OpenAIProblem
from tests.integration.engines.oracle import Oracle
from tests.integration.rollout.test_sessions import SEED, check_logprobs, examples, opened
from tests.kit import web
from tests.kit.replicas import ReplicaProcess, ReplicaThread

PROMPT = [22, 26, 14, 24, 27, 32]


def ask(replica: ReplicaProcess, **body: Any) -> httpx.Response:
    return web.post(f"{replica.url}/inference/v1/generate", json=body)


def error(answer: httpx.Response, status: int = 422) -> ErrorBody:
    """What clients of OpenAI and vLLM read of a refusal."""
    assert answer.status_code == status, answer.text
    return OpenAIProblem.model_validate_json(answer.content).error


def test_samples_are_those_of_a_rollout(replica: ReplicaProcess) -> None:
    drawn = {"temperature": 0.7, "min_p": 0.01, "max_tokens": 8, "seed": 5, "stop_token_ids": [9], "stop": ["7"]}
    answer = ask(
        replica,
        token_ids=PROMPT,
        sampling_params={**drawn, "n": 3, "logprobs": 1, "top_p": 1.0, "skip_special_tokens": False},
        request_id="mine",
        return_token_ids=True,
    ).json()
    same = web.post(f"{replica.url}/v1/rollouts", json={"prompt_ids": PROMPT, "n": 3, "sampling": drawn}).json()
    assert (answer["request_id"], answer["prompt_token_ids"], answer["recording"]) == ("mine", PROMPT, None)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, sample in zip(answer["choices"], same["samples"], strict=True):
        assert choice["token_ids"] == sample["token_ids"]
        assert [token["logprob"] for token in choice["logprobs"]["content"]] == sample["logprobs"]
        assert [token["token_id"] for token in choice["logprobs"]["content"]] == sample["token_ids"]
        assert (choice["kept_mass"], choice["kept_count"]) == (sample["kept_mass"], sample["kept_count"])
        assert (choice["finish_reason"], choice["weight_versions"]) == (sample["finish_reason"], sample["versions"])
    drawn_tokens = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": drawn_tokens,
        "total_tokens": 6 + drawn_tokens,
    }


def test_a_sample_may_fill_the_context(replica: ReplicaProcess) -> None:
    """vLLM's default as well."""
    (choice,) = ask(replica, token_ids=[5] * 250).json()["choices"]
    assert choice["logprobs"] is None
    assert len(choice["token_ids"]) <= 6
    assert (len(choice["token_ids"]) == 6) or choice["finish_reason"] == "stop"


def test_a_sample_may_fill_a_context_of_any_length(model: Path, tmp_path: Path) -> None:
    with ReplicaThread(tmp_path, "--model", str(model), "--engine", "fake", "--max-context", "2000000") as long:
        ending = {"stop_token_ids": list(range(64))}
        assert ask(long, token_ids=[5], sampling_params=ending).status_code == 200
        told = error(ask(long, token_ids=[5], sampling_params={"n": 5}))
    assert told.param == "sampling_params.n"
    assert "at most 4 samples of up to 1000000 tokens" in told.message


async def test_the_fields_own_client_plays_a_session(replica: ReplicaProcess, model: Path) -> None:
    renderer = create_renderer(AutoTokenizer.from_pretrained(model), DefaultRendererConfig())
    with opened(replica, sampling={"max_tokens": 6, "seed": SEED}) as session:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="none", max_retries=0) as client:
            said: list[dict[str, Any]] = []
            prompt_ids = PROMPT
            for _ in range(3):
                options = {"temperature": 1.0, "routed_experts_prompt_start": 4}
                said.append(
                    await generate(
                        client=client,
                        renderer=renderer,
                        messages=[],
                        model=session.model,
                        prompt_ids=prompt_ids,
                        sampling_params=options,
                    )
                )
                prompt_ids = [*prompt_ids, *said[-1]["completion_ids"], 14, 24]
        body = session.finish(1.0)
    (sample,) = body["group"]["samples"]
    assert body["group"]["prompt_ids"] == PROMPT
    assert [span["end"] - span["start"] for span in sample["environment"]] == [2, 2]
    assert PROMPT + sample["token_ids"] == prompt_ids[:-2]
    assert [logprob for turn in said for logprob in turn["completion_logprobs"]] == sample["logprobs"]
    check_logprobs(Oracle(model), PROMPT, sample)


def turn(session: Any, token_ids: list[int], status: int = 200, **body: Any) -> Any:
    answer = session.post("inference/v1/generate", token_ids=token_ids, **body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_tokens_that_begin_otherwise_open_a_branch(replica: ReplicaProcess) -> None:
    with opened(replica, sampling={"max_tokens": 4, "seed": SEED}) as session:
        first = turn(session, PROMPT)
        drawn = first["choices"][0]["token_ids"]
        assert first["recording"] == {"turn": 0, "parent": None, "fork": None}
        assert turn(session, [*PROMPT, *drawn, 5])["recording"] == {"turn": 1, "parent": 0, "fork": None}
        assert turn(session, [*PROMPT, *drawn, 6])["recording"] == {"turn": 2, "parent": 0, "fork": "rewritten"}
        assert turn(session, [*PROMPT, *drawn[:-1], 6])["recording"]["parent"] is None
        body = session.finish()
    assert (body["turns"], body["branches"], body["drifted"]) == (4, 3, 0)


def test_a_text_continues_tokens(replica: ReplicaProcess, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    with opened(replica, sampling={"max_tokens": 4, "seed": SEED}) as session:
        prompt_ids = tokenizer.encode("1+1=", add_special_tokens=False)
        drawn = turn(session, prompt_ids)["choices"][0]["token_ids"]
        text = tokenizer.decode([*prompt_ids, *drawn, *tokenizer.encode("2", add_special_tokens=False)])
        answer = session.openai.completions.create(model=session.model, prompt=text)
        assert answer.model_extra is not None
        assert answer.model_extra["recording"] == {"turn": 1, "parent": 0, "fork": None}


def test_a_request_sent_again_is_recorded_once(replica: ReplicaProcess) -> None:
    answers: list[dict[str, Any]] = []
    with opened(replica, sampling={"max_tokens": 4}) as session:
        path, key = f"/v1/sessions/{session.id}/inference/v1/generate", {"Idempotency-Key": "a"}
        for name in ("first", "again"):  # a name is no part of what is asked
            body = {"token_ids": PROMPT, "request_id": name}
            answers.append(session.http.post(path, headers=key, json=body).json())
            assert answers[-1].pop("request_id") == name
        assert answers[0] == answers[1]
        assert session.status()["turns"] == 1


@pytest.mark.parametrize(
    ("settings", "param", "allowed"),
    [
        ({"top_p": 0.9}, "sampling_params.top_p", "only 1"),
        ({"top_k": 20}, "sampling_params.top_k", ""),
        ({"min_p": 0}, "sampling_params.min_p", ""),
        ({"repetition_penalty": 1.1}, "sampling_params.repetition_penalty", "only 1"),
        ({"min_tokens": 3}, "sampling_params.min_tokens", "only 0"),
        ({"ignore_eos": True}, "sampling_params.ignore_eos", "only false"),
        ({"logprobs": 5}, "sampling_params.logprobs", ""),
        ({"guided": "a"}, "sampling_params.guided", "only the fields"),
        ({"logit_bias": {"3": 1}}, "sampling_params.logit_bias", "only empty"),
        ({"bad_words": ["a"]}, "sampling_params.bad_words", "only empty"),
        ({"stop": ["a", ""]}, "sampling_params.stop.1", "string of 1 to 256"),
        ({"stop": ["a"] * 17}, "sampling_params.stop", "list of 0 to 16"),
        ({"stop": 7}, "sampling_params.stop", "list of 0 to 16"),
    ],
)
def test_what_would_change_the_policy_is_refused(
    replica: ReplicaProcess, settings: dict[str, Any], param: str, allowed: str
) -> None:
    told = error(ask(replica, token_ids=PROMPT, sampling_params=settings))
    assert told.param is not None
    assert told.param.startswith(param)
    assert allowed in told.message


def test_refusals_name_what_is_wrong(replica: ReplicaProcess) -> None:
    assert "token id 96" in error(ask(replica, token_ids=[1, 96])).message
    assert error(ask(replica, token_ids=[1, True])).param == "token_ids.1"
    full = error(ask(replica, token_ids=[1] * 256))
    assert (full.code, full.param) == ("context_length_exceeded", "token_ids")
    assert "has only" in error(ask(replica, token_ids=[1], model="gpt"), 404).message
    assert error(ask(replica, token_ids=[1], stream=True)).param == "stream"
    assert error(ask(replica, token_ids=[1], features={})).param == "features"
    with opened(replica, sampling={"max_tokens": 4}) as session:
        for name, value, allowed in (
            ("n", 2, "1 in a session"),
            ("min_p", 0.1, "the session's"),
            ("temperature", 0.5, "the session's"),
        ):
            told = turn(session, PROMPT, 422, sampling_params={name: value})["error"]
            assert told["param"] == f"sampling_params.{name}"
            assert allowed in told["message"]
        assert turn(session, [1, 96], 422)["error"]["param"] == "token_ids"
        assert turn(session, [1] * 256, 422)["error"]["code"] == "context_length_exceeded"
        assert session.status()["turns"] == 0


def test_the_model_is_the_run(replica: ReplicaProcess, shared_run_id: str) -> None:
    with openai.OpenAI(base_url=f"{replica.url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        assert (model.id, model.max_model_len) == (shared_run_id, 256)  # type: ignore[attr-defined]
        assert client.models.retrieve(shared_run_id) == model
        with pytest.raises(openai.NotFoundError, match="has only"):
            client.models.retrieve("gpt")


def test_the_example_of_the_readme_runs(replica: ReplicaProcess, capsys: pytest.CaptureFixture[str]) -> None:
    _, code, _ = examples()
    exec(code.replace("http://127.0.0.1:8000", replica.url), names := dict[str, Any]())
    samples = ast.literal_eval(capsys.readouterr().out)
    assert (len(samples), samples[0]["prompt_ids"]) == (1, None)
    assert [span["end"] - span["start"] for span in samples[0]["environment"]] == [2]
    assert [22, 26, 14, 24, 27, 32, *samples[0]["token_ids"]] == names["token_ids"]
