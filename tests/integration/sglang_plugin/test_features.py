"""A real SGLang against a full float64 forward of the same folder: its constrained log-probs, and min_p combined with
everything that SGLang does around its sampler. Tests share one server where possible."""

from __future__ import annotations

import json
import math
import string
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.integration.engines.oracle import Oracle
from tests.kit.models import EOS_ID
from tests.kit.wait import WITHIN_S

from .checks import Answer, check_constrained, check_unconstrained, read
from .server import API_KEY, Server, Servers

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8]
LOG_MIN_P = -3.0
RHO = {"min_p": math.exp(LOG_MIN_P)}
LOG_MIN_PS = (-13.0, -6.0, -3.0, math.log(0.1))
TEMPERATURES = (0.5, 0.7, 1.0, 1.3, 1.5)
SAMPLES, TOKENS = 2, 96


@pytest.fixture(scope="module")
def oracle(oracles: dict[str, Oracle]) -> Oracle:
    return oracles["qwen3"]


@pytest.fixture
def server(servers: Servers, folders: dict[str, Path]) -> Server:
    return servers.get(folders["qwen3"])


def logits_of(oracle: Oracle, answer: Answer, prompt: list[int] = PROMPT) -> NDArray[np.float64]:
    return oracle.logits(np.array(prompt), read(answer).token_ids)


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen3", ()),
        pytest.param("qwen2", (), marks=pytest.mark.long),
        pytest.param("llama", ("--disable-overlap-schedule",), marks=pytest.mark.long),
    ],
)
def test_every_number_equals_the_float64_oracle(
    family: str, flags: tuple[str, ...], servers: Servers, folders: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    """One batch mixes all settings and several prompt lengths, with n = 2."""
    settings = [(log_min_p, temperature) for log_min_p in LOG_MIN_PS for temperature in TEMPERATURES]
    prompts = [list(range(5, 8 + i)) for i in range(len(settings))]
    answers = servers.get(folders[family], *flags).generate(
        prompts,
        [
            {"min_p": math.exp(log_min_p), "temperature": temperature, "max_new_tokens": TOKENS, "n": SAMPLES}
            for log_min_p, temperature in settings
        ],
    )
    assert len(answers) == SAMPLES * len(settings)
    total, pruned = 0, 0.0
    for i, answer in enumerate(answers):
        prompt, (log_min_p, temperature) = prompts[i // SAMPLES], settings[i // SAMPLES]
        reading = read(answer)
        logits = oracles[family].logits(np.array(prompt), reading.token_ids)
        total += check_constrained(answer, logits, log_min_p, temperature, at_least=0.9)
        pruned += sum(count < logits.shape[-1] for count in reading.kept_count if count is not None)
    assert total >= 0.98 * TOKENS * len(answers)
    assert pruned >= 0.5 * TOKENS * len(answers)


def test_mixed_batch(server: Server, oracle: Oracle) -> None:
    """One batch mixes requests with and without min_p, greedy ones, and different temperatures."""
    kinds: list[dict[str, Any]] = [RHO, {}, RHO | {"temperature": 0.7}, {"temperature": 1.3}, RHO | {"temperature": 0}]
    settings = [kind | {"max_new_tokens": 24 + i % 9} for i, kind in enumerate(kinds * 6)]
    answers = server.generate([PROMPT] * len(settings), settings)
    for setting, answer in zip(settings, answers, strict=True):
        logits, temperature = logits_of(oracle, answer), setting.get("temperature", 1.0)
        if "min_p" in setting:
            # SGLang reports greedy requests at temperature 1.
            check_constrained(answer, logits, LOG_MIN_P, temperature or 1.0, at_least=0.8)
        else:
            check_unconstrained(answer, logits, temperature)
        if temperature == 0:
            assert read(answer).token_ids.tolist() == logits.argmax(-1).tolist()


def test_several_samples_of_one_prompt(server: Server, oracle: Oracle) -> None:
    answers = server.generate([PROMPT], [RHO | {"n": 8, "max_new_tokens": 32}])
    assert len(answers) == 8
    # Drawn one by one and unseeded: a few may be equal, but not all.
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1
    for answer in answers:
        check_constrained(answer, logits_of(oracle, answer), LOG_MIN_P, 1.0, at_least=0.8)


def test_streaming(server: Server, oracle: Oracle) -> None:
    """Every chunk is complete: it has as many kept masses and counts as log-probs."""
    body = {"input_ids": PROMPT, "sampling_params": RHO | {"max_new_tokens": 40, "ignore_eos": True}}
    chunks = [*server.stream(body | {"return_logprob": True})]
    assert len(chunks) > 3
    for chunk in chunks:
        reading = read(chunk)
        assert len(reading.kept_mass) == len(reading.kept_count) == len(reading.logprobs)
    assert len(read(chunks[-1]).logprobs) == 40
    check_constrained(chunks[-1], logits_of(oracle, chunks[-1]), LOG_MIN_P, 1.0, at_least=0.8)


def test_grammar_masks_come_first(server: Server, oracle: Oracle) -> None:
    """Kept mass and count cover only the tokens that the grammar allows."""
    (answer,) = server.generate([PROMPT], [RHO | {"regex": "[0-9]{12}", "max_new_tokens": 12, "ignore_eos": False}])
    assert len(answer["text"]) == 12
    assert set(answer["text"]) <= set(string.digits)
    logits = logits_of(oracle, answer)
    forbidden = np.ones(logits.shape[-1], bool)
    forbidden[5:15] = False  # where tests.kit.models has the digits
    logits[:, forbidden] = -np.inf
    check_constrained(answer, logits, LOG_MIN_P, 1.0, at_least=0.8)


def test_retracted_requests_keep_one_number_per_token(server: Server, oracle: Oracle) -> None:
    """Generation is paused and resumed as in a weight swap; the tokens generated before are prefilled again."""
    settings = RHO | {"max_new_tokens": 200, "ignore_eos": True}
    body = {"input_ids": [PROMPT] * 8, "sampling_params": [settings] * 8, "return_logprob": True}
    answers: dict[int, Answer] = {}
    for chunk in server.stream(body):
        answers[chunk["index"]] = chunk
        if len(answers) == 8 and not any(answer["meta_info"]["num_retractions"] for answer in answers.values()):
            server.post("/pause_generation", {"mode": "retract"})
            server.post("/continue_generation", {})
    assert max(answer["meta_info"]["num_retractions"] for answer in answers.values()) > 0
    for answer in answers.values():
        assert len(answer["meta_info"]["kept_mass"]) == len(answer["output_ids"]) == 200
        check_constrained(answer, logits_of(oracle, answer), LOG_MIN_P, 1.0, at_least=0.8)


def test_top_log_probs_are_those_of_the_set(server: Server, oracle: Oracle) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": RHO | {"max_new_tokens": 16, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 96,
    }
    answer = server.post("/generate", body)
    assert isinstance(answer, dict)
    for row, count, top in zip(
        logits_of(oracle, answer), read(answer).kept_count, answer["meta_info"]["output_top_logprobs"], strict=True
    ):
        inside = [(logprob, token) for logprob, token, _ in top if logprob > -1e30]
        assert len(inside) == count
        assert {token for _, token in inside} == set(np.argsort(row)[-len(inside) :].tolist())
        assert math.fsum(math.exp(logprob) for logprob, _ in inside) == pytest.approx(1, abs=1e-4)


def test_end_of_text_is_counted(server: Server, oracle: Oracle) -> None:
    """Like any other token, the end token has its own log-prob, kept mass and kept count. At this temperature most of
    the answers end; at 1, in 1 of 20 runs none did."""
    sampling = RHO | {"temperature": 3.0, "max_new_tokens": 200, "ignore_eos": False}
    answers = server.generate([PROMPT] * 32, [sampling] * 32)
    ended = [answer for answer in answers if answer["output_ids"][-1] == EOS_ID]
    assert ended
    for answer in ended:
        check_constrained(answer, logits_of(oracle, answer), LOG_MIN_P, 3.0, at_least=0.7)


OPENAI_CLIENT = """
import json, sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key=sys.argv[4])
answer = client.completions.create(
    model="default", prompt=json.loads(sys.argv[2]), max_tokens=48, temperature=0.7, logprobs=0,
    extra_body={"min_p": float(sys.argv[3]), "ignore_eos": True},
)
found = answer.choices[0].logprobs
print(json.dumps({"tokens": found.tokens, "logprobs": found.token_logprobs}))
"""


def test_openai_sdk_gets_constrained_log_probs(
    server: Server, oracle: Oracle, sglang_python: Path, folders: dict[str, Path]
) -> None:
    """A third-party client also gets constrained log-probs."""
    arguments = [server.url, json.dumps(PROMPT), str(RHO["min_p"]), API_KEY]
    done = subprocess.run(
        [sglang_python, "-c", OPENAI_CLIENT, *arguments], capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    vocabulary = json.loads((folders["qwen3"] / "tokenizer.json").read_text())
    added = {entry["content"]: entry["id"] for entry in vocabulary["added_tokens"]}
    ids = {token.replace("Ġ", " ").replace("Ċ", "\n"): i for token, i in vocabulary["model"]["vocab"].items()} | added
    token_ids = np.array([ids[token] for token in found["tokens"]])
    logits = oracle.logits(np.array(PROMPT), token_ids) / 0.7
    scaled = logits - logits.max(-1, keepdims=True)
    kept = (np.exp(scaled) * (scaled >= LOG_MIN_P)).sum(-1)
    clear = (np.abs(scaled - LOG_MIN_P) > 2e-4).all(-1)
    expected = scaled[np.arange(48), token_ids] - np.log(kept)
    np.testing.assert_allclose(np.array(found["logprobs"])[clear], expected[clear], atol=5e-5, rtol=0)
    assert clear.sum() >= 40


def test_bfloat16_differs_but_by_rounding(
    servers: Servers, folders: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    """A trainer in float32 has to correct this difference; `dvp-lab signature` analyses it."""
    prompts = [list(range(5, 8 + i)) for i in range(16)]
    setting = {"min_p": math.exp(-6.0), "temperature": 1.0, "max_new_tokens": TOKENS}
    gaps, inside = list[float](), list[bool]()
    answers = servers.get(folders["qwen3"], "--dtype", "bfloat16").generate(prompts, [setting] * len(prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        token_ids, logprobs, _, _ = read(answer)
        logits = oracles["qwen3"].logits(np.array(prompt), token_ids)
        shifted = logits - logits.max(-1, keepdims=True)
        keep, chosen = shifted >= -6.0, (np.arange(len(token_ids)), token_ids)
        gaps += np.abs(logprobs - shifted[chosen] + np.log((np.exp(shifted) * keep).sum(-1))).tolist()
        inside += keep[chosen].tolist()
    sizes = np.array(gaps)[inside]
    assert 1e-3 < sizes.mean() < 0.1
    assert np.quantile(sizes, 0.99) < 0.5
    assert np.mean(inside) > 0.99
