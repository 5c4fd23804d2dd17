"""Groups of hand-made samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.contract.group import EngineFacts, FinishReason, Group, Sample, VersionSpan
from services.contract.job import Sink, job_id
from services.contract.sampling import Sampling
from trainer.batch import ScoredGroup

RUN = "unit"


def make_sample(
    token_ids: Sequence[int], logprobs: Sequence[float], *, finish: FinishReason = FinishReason.STOP, seq: int = 1
) -> Sample:
    T = len(token_ids)
    return Sample(
        token_ids=np.array(token_ids),
        logprobs=np.array(logprobs, np.float32),
        kept_mass=np.full(T, 0.9, np.float32),
        kept_count=np.full(T, 5),
        finish_reason=finish,
        versions=(VersionSpan(version=f"{RUN}:{seq}:abc", start=0, end=T),),
        seed=1,
    )


def make_group(
    prompt_ids: Sequence[int],
    samples: Sequence[Sample],
    rewards: Sequence[float],
    *,
    position: int = 0,
    sampling: Sampling | None = None,
    staleness: int = 0,
) -> ScoredGroup:
    group = Group(
        job_id=job_id(RUN, position, 0),
        run_id=RUN,
        prompt_ids=np.array(prompt_ids),
        sampling=sampling or Sampling(),
        samples=tuple(samples),
        sink=Sink.TRAIN,
        replica_id="replica",
        engine=EngineFacts(name="test", version="1", dtype="float32"),
    )
    return ScoredGroup(group, tuple(rewards), staleness)
