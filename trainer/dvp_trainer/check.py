"""`dvp-train check MODEL`: how a run would treat a model, and how close a replica's log-probs are, without a run."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from dvp_rl.client import Client
from dvp_rl.contract.errors import ConfigError, RequestError
from dvp_rl.contract.group import Sample
from dvp_rl.contract.http import RolloutResponse
from dvp_rl.contract.shape import Shape
from dvp_rl.contract.weights import WeightVersion
from dvp_rl.engines.context import edges, rope_limit
from dvp_rl.engines.model_folder import has_linear_head
from dvp_rl.engines.reference import some_tokens
from dvp_rl.engines.threads import num_threads
from dvp_rl.engines.transformers import TransformersEngine
from dvp_rl.weights.folder import folder_digest

from .config import CheckSettings, ModelSection
from .data.batch import Episode
from .learn.arrangement import trials
from .learn.micro_batch import micro_batches
from .learn.model import Policy, load_model

PROMPT_TOKENS = 8


class Line(NamedTuple):
    """A line of the printed table."""

    what: str
    found: str

    def __str__(self) -> str:
        return f"{self.what:<32} {self.found}"


def check_model(settings: CheckSettings) -> Iterator[Line]:
    """Yields the findings as they are made. Raises ConfigError where a run would refuse the model, UnavailableError if
    the replica does not answer."""
    torch.set_num_threads(num_threads(settings.threads, reproducible=settings.model.fixed_shape is not None))
    seconds: dict[str, float] = {}
    yield from _check_trainer(settings, seconds)
    yield Line("transformers engine", _served(settings.model))
    yield Line("took", ", ".join(f"{what} {spent:.1f} s" for what, spent in seconds.items()))


def _check_trainer(settings: CheckSettings, seconds: dict[str, float]) -> Iterator[Line]:
    section, sampling = settings.model, settings.sampling
    with _timed(seconds, "loading"):
        model = load_model(section)
    yield Line("model", f"{type(model).__name__}, {model.num_parameters() / 1e6:.1f} M parameters")
    yield Line("weights", "complete, with no unexpected ones")
    yield Line("a second forward", "gives the same logits")
    linear = has_linear_head(model)
    yield Line("LM head", "linear, computed in blocks" if linear else "not only linear, so full logits are computed")
    limit = rope_limit(model.config)
    yield Line("rope", "does not change" if limit is None else f"changes in sequences of more than {limit} tokens")
    yield Line("windows and chunks", ", ".join(map(str, edges(model.config))) or "none")
    if section.fixed_shape is None:
        for arrangement, found, refusal in trials(model, packable=linear):
            yield Line(str(arrangement), refusal or f"hidden states differ by {found:.1g} standard deviations")
    with _timed(seconds, "trials at start"):
        policy = Policy(
            model,
            section.compute_dtype,
            log_min_p=sampling.log_min_p,
            temperature=sampling.temperature,
            shape=None if section.fixed_shape is None else Shape.parse(section.fixed_shape),
            fp32_head=section.fp32_head,
        )
    how = policy.arrangement if policy.shape is None else f"of {policy.shape} tokens"
    yield Line("a run's micro-batches", f"{how}, in {section.compute_dtype}")
    if settings.replica is not None:
        yield from _check_replica(settings, policy)


def _check_replica(settings: CheckSettings, policy: Policy) -> Iterator[Line]:
    """Compares both sides' log-probs of the replica's samples, each side under its own safe set."""
    answer = _sampled(settings, policy.model)
    engine, digest = answer.engine, WeightVersion.parse(answer.samples[0].versions[0].version).digest
    if digest != folder_digest(settings.model.path):
        raise ConfigError(
            f"replica = {settings.replica!r} serves weights {digest}, which are not those of {settings.model.path}"
        )
    yield Line("replica", f"{engine.name} {engine.version}, {engine.dtype}{', fp32 head' * engine.fp32_head}")
    prompt_ids = np.array(answer.prompt_ids)
    episodes = [
        Episode(i, prompt_ids, (Sample.model_validate(body.model_dump(exclude={"text"})),))
        for i, body in enumerate(answer.samples)
    ]
    limit = policy.limit(settings.model.micro_batch_tokens)
    gaps, num_outside = [], 0
    with torch.no_grad():
        for micro in micro_batches(episodes, limit, pad_id=0, device=policy.model.device):
            own = policy.read(micro)
            ours, theirs = own.logprobs[own.inside], micro.infer.logprobs[micro.mask][own.inside]
            gaps.append((ours - theirs).abs().double())
            num_outside += int((~own.inside).sum())
    gap = torch.cat(gaps)
    yield Line("its tokens outside our safe set", f"{num_outside} of {len(gap) + num_outside}")
    if len(gap):
        yield Line("its log-probs against ours", f"{gap.mean():.1e} nats apart on average, {gap.max():.1e} at most")


def _sampled(settings: CheckSettings, model: PreTrainedModel) -> RolloutResponse:
    sampling = settings.sampling
    body: Mapping[str, object] = {
        "min_p": math.exp(sampling.log_min_p),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "stop": sampling.stop,
        "seed": 0,
    }
    assert settings.replica is not None
    prompt = some_tokens(model, PROMPT_TOKENS).tolist()
    with Client(settings.replica, token=settings.replica_token.get_secret_value() or None) as client:
        try:
            return client.rollout(prompt_ids=prompt, n=sampling.n, sampling=body, return_text=False)
        except RequestError as error:
            raise ConfigError(f"replica = {settings.replica!r}: {error}") from error


def _served(section: ModelSection) -> str:
    async def start() -> None:
        engine = TransformersEngine(section.path, device=section.device)
        await engine.start()
        await engine.close()

    try:
        asyncio.run(start())
    except ConfigError as error:
        return f"refuses it: {error}"
    return "serves it"


@contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[what] = time.monotonic() - began
