"""Hand-made jobs, samples and groups."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dvp_rl.contract.completions import Completion, Fate
from dvp_rl.contract.group import EngineFacts, EnvironmentSpan, FinishReason, Group, Sample, VersionSpan
from dvp_rl.contract.job import Job, Sink, job_id
from dvp_rl.contract.sampling import Sampling
from dvp_rl.contract.session import Turn, digest
from dvp_trainer.data.batch import ScoredGroup

RUN = "unit"


def make_job(
    run_id: str, position: int = 0, *, n: int = 2, sink: Sink = Sink.TRAIN, deadline: float | None = None
) -> Job:
    name = job_id(run_id, position, 0) if sink is Sink.TRAIN else f"{sink}-{position}"
    return Job(job_id=name, run_id=run_id, prompt_ids=[1, 2, 3], n=n, sink=sink, deadline=deadline)


def make_sample(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    finish: FinishReason = FinishReason.STOP,
    run_id: str = RUN,
    seq: int = 1,
) -> Sample:
    T = len(token_ids)
    return Sample(
        token_ids=np.array(token_ids),
        logprobs=np.array(logprobs, np.float32),
        kept_mass=np.full(T, 0.9, np.float32),
        kept_count=np.full(T, 5),
        finish_reason=finish,
        versions=(VersionSpan(version=f"{run_id}:{seq}:ab", start=0, end=T),),
        seed=1,
    )


def make_episodes(run_id: str, position: int = 0, *, n: int = 2, sink: Sink = Sink.TRAIN, **fields: Any) -> Job:
    """A job whose n episodes a harness plays."""
    job = make_job(run_id, position, n=n, sink=sink)
    return Job.model_validate(job.model_dump() | {"prompt_ids": (), "task": {"row": position}} | fields)


def make_turn(
    name: str, *, num_tokens: int = 2, parent: int | None = None, run_id: str = RUN, seq: int = 1, **fields: Any
) -> Turn:
    return Turn.model_validate(
        {
            "turn_id": name,
            "parent": parent,
            "context_ids": [1],
            "sample": make_sample([2] * num_tokens, [-1.0] * num_tokens, run_id=run_id, seq=seq),
            "engine": EngineFacts(name="fake", version="1", dtype="float32"),
            "replica_id": "replica",
            "num_chars": 1,
            "text_digest": digest("a"),
            "answer_digest": digest("c"),
            "at": 0.0,
        }
        | fields
    )


Segment = tuple[Sequence[int], Sequence[float] | None]
"""Token ids and their log-probs; None: the environment's."""


def make_turns(
    segments: Sequence[Segment],
    *,
    prompt_ids: Sequence[int] | None = None,
    finish: FinishReason = FinishReason.STOP,
    run_id: str = RUN,
) -> Sample:
    """A sample of several turns. Each segment of the model is drawn by the next version of the weights."""
    versions: list[VersionSpan] = []
    environment: list[EnvironmentSpan] = []
    start = 0
    for ids, logprobs in segments:
        place = {"start": start, "end": start + len(ids)}
        if logprobs is None:
            environment.append(EnvironmentSpan(**place))
        else:
            versions.append(VersionSpan(version=f"{run_id}:{len(versions)}:ab", **place))
        start += len(ids)
    drawn = np.concatenate([logprobs for _, logprobs in segments if logprobs is not None])
    return Sample(
        token_ids=np.concatenate([ids for ids, _ in segments]),
        logprobs=drawn.astype(np.float32),
        kept_mass=np.full(len(drawn), 0.9, np.float32),
        kept_count=np.full(len(drawn), 5),
        finish_reason=finish,
        versions=tuple(versions),
        environment=tuple(environment),
        prompt_ids=prompt_ids,
        seed=1,
    )


def make_group(job: Job, replica_id: str = "replica-0", samples: Sequence[Sample] = ()) -> Group:
    """The result of `job` from `replica_id`. Without `samples`, it has `job.n` samples of two tokens."""
    return Group(
        job_id=job.job_id,
        run_id=job.run_id,
        prompt_ids=job.prompt_ids,
        sampling=job.sampling,
        samples=tuple(samples) or (make_sample([5, 6], [-0.5, -0.25], run_id=job.run_id, seq=0),) * job.n,
        sink=job.sink,
        replica_id=replica_id,
        engine=EngineFacts(name="fake", version="1", dtype="float32"),
    )


def make_scored(
    prompt_ids: Sequence[int],
    samples: Sequence[Sample],
    rewards: Sequence[float],
    *,
    position: int = 0,
    sampling: Sampling | None = None,
    staleness: int = 0,
    episode_sizes: Sequence[int] = (),
    metrics: Sequence[Mapping[str, float]] = (),
) -> ScoredGroup:
    job = make_job(RUN, position, n=len(rewards))
    job = job.model_copy(update={"prompt_ids": np.array(prompt_ids), "sampling": sampling or Sampling()})
    played = {"episode_sizes": tuple(episode_sizes), "metrics": tuple(metrics)}
    group = make_group(job, samples=samples).model_copy(update=played)
    return ScoredGroup(group, tuple(rewards), staleness)


def write_completions(path: Path, steps: Sequence[int], prompt: str = "<user>37+58") -> None:
    """One completion per step, with a token of each mark and one of the environment."""
    lines = []
    for step in steps:
        shown = Completion(
            row=7,
            prompt=prompt,
            answer="95",
            reward=1.0,
            advantage=0.5,
            fate=Fate.TRAINED,
            weight=1.01,
            finish_reason="stop",
            num_tokens=5,
            num_skipped=0,
            tokens=["The ", "sum ", "of step ", f"{step} is ", "95"],
            kept_mass=[1.0, 0.998, 0.98, 0.5, None],
            infer_logprobs=[-0.1, -0.2, -0.3, -0.4, None],
            train_logprobs=None,
            num_environment=1,
            num_forks=2,
        )
        lines.append(json.dumps({"step": step, "completions": [asdict(shown)]}) + "\n")
    write_at_once(path, "".join(lines))


def write_at_once(path: Path, text: str) -> None:
    """Replaces the file as the trainer does: who looks meanwhile sees the old one or the new one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
