"""Constrained log-probs of a real SGLang, in float32, against a full forward of the same folder in float64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.integration.engines.oracle import Oracle

from .checks import check_constrained, read
from .server import Servers

LOG_MIN_PS = (-13.0, -6.0, -3.0, math.log(0.1))
TEMPERATURES = (0.5, 0.7, 1.0, 1.3, 1.5)
SAMPLES, TOKENS = 2, 96


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        pytest.param("qwen3", (), marks=pytest.mark.slow),
        pytest.param("qwen2", (), marks=pytest.mark.long),
        pytest.param("llama", ("--disable-overlap-schedule",), marks=pytest.mark.long),
    ],
)
def test_every_number_equals_the_float64_oracle(
    family: str, flags: tuple[str, ...], servers: Servers, folders: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    """All settings in one batch, several prompt lengths, n = 2."""
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


@pytest.mark.slow
def test_bfloat16_differs_but_by_rounding(
    servers: Servers, folders: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    """What a trainer in float32 has to correct; `dvp-lab signature` takes it apart."""
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
