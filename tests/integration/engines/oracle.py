"""The results that an engine must return, from a full float64 forward of its folder, without any code of dvp_rl.dvp."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from dvp_rl.contract.group import Sample
from dvp_rl.contract.job import Job

TOLERANCE = 5e-5


@dataclass(frozen=True)
class Expected:
    """Expected values, [T] each."""

    logprobs: NDArray[np.float64]
    kept_mass: NDArray[np.float64]
    kept_count: NDArray[np.int64]
    clear: NDArray[np.bool_]
    """True where no token is so close to the threshold that float32 logits may decide otherwise."""


class Oracle:
    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",  # the faster ones lack float64
        ).eval()

    @torch.inference_mode()
    def logits(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> NDArray[np.float64]:
        """The logits [T, V] that each token was drawn from."""
        ids = torch.from_numpy(np.concatenate((prompt_ids, token_ids)).astype(np.int64))
        out: NDArray[np.float64] = self._model(ids[None]).logits[0, len(prompt_ids) - 1 : -1].numpy()
        return out

    def expect(self, job: Job, token_ids: NDArray[np.int32]) -> Expected:
        logits = self.logits(job.prompt_ids, token_ids)
        T, log_min_p = job.sampling.temperature, job.sampling.log_min_p
        if T == 0:
            greedy = (logits.argmax(-1) == token_ids).astype(float)
            return Expected(np.log(greedy), greedy, greedy.astype(int), np.ones(len(token_ids), bool))
        scaled = (logits - logits.max(-1, keepdims=True)) / T
        keep = scaled >= log_min_p
        weights = np.exp(scaled)
        kept = (weights * keep).sum(-1)
        chosen = scaled[np.arange(len(token_ids)), token_ids]
        return Expected(
            logprobs=np.where(chosen >= log_min_p, chosen - np.log(kept), -np.inf),
            kept_mass=kept / weights.sum(-1),
            kept_count=keep.sum(-1),
            clear=(np.abs(scaled - log_min_p) > 2 * TOLERANCE / T).all(-1),
        )

    def check(self, job: Job, sample: Sample, start: int = 0, end: int | None = None) -> int:
        """Checks the values of token_ids[start:end] against these weights; returns how many positions were clear."""
        span = slice(start, end)
        expected = self.expect(job, sample.token_ids)
        clear = expected.clear[span]
        close = {"atol": TOLERANCE, "rtol": 0}
        np.testing.assert_allclose(sample.logprobs[span][clear], expected.logprobs[span][clear], **close)
        np.testing.assert_allclose(sample.kept_mass[span][clear], expected.kept_mass[span][clear], **close)
        np.testing.assert_array_equal(sample.kept_count[span][clear], expected.kept_count[span][clear])
        return int(clear.sum())

    def check_all(self, job: Job, samples: tuple[Sample, ...]) -> None:
        """Checks all samples of a job, at least 98 % of their positions minus two."""
        assert len(samples) == job.n
        checked = sum(self.check(job, sample) for sample in samples)
        assert checked >= 0.98 * sum(len(sample.token_ids) for sample in samples) - 2

    def policy(self, job: Job) -> tuple[NDArray[np.float64], float]:
        """pi_mp [V] of the first new token, and its kept mass."""
        logits = self.logits(job.prompt_ids, np.zeros(1, np.int32))[0]
        scaled = (logits - logits.max()) / job.sampling.temperature
        weights = np.exp(scaled)
        kept = weights * (scaled >= job.sampling.log_min_p)
        return kept / kept.sum(), float(kept.sum() / weights.sum())
