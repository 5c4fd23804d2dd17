"""Sampling settings: part of every job. A group drawn under another policy than the trainer's is refused."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from .record import Record

LOG_RHO = -13.0
"""Natural log of the paper's threshold rho = e^-13, relative to the most likely token. Sent as this float64."""

MIN_P = math.exp(LOG_RHO)
MAX_SEED = 2**63 - 1
MAX_NEW_TOKENS = 1_000_000
"""Most tokens of a sample."""
MAX_STOPS = 16
"""Most stop strings of a sample."""
MAX_STOP_TOKENS = 64
"""Most stop tokens of a sample, besides the model's end of sequence."""
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[tuple[StopText, ...], Field(max_length=MAX_STOPS, fail_fast=True)]


def log_of(min_p: float) -> float:
    """Natural log of a min-p that a client gave."""
    return LOG_RHO if min_p == MIN_P else math.log(min_p)  # exp(-13) has a log that is not exactly -13


class Sampling(Record):
    """The constrained policy's settings, and when to stop.

    top_p, top_k, penalties and grammars do not exist here: log-probs under min-p are those of the sampler only if
    nothing else prunes.
    """

    log_min_p: Annotated[float, Field(ge=-1e4, le=0.0)] = LOG_RHO
    """Natural log of min-p. 0 keeps only the most likely token and its ties."""

    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    """0 is greedy: the most likely token, log-prob 0, kept mass 1. Greedy samples have no importance weight, so they
    are refused for training."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] = 256
    stop: Stops = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(max_length=MAX_STOP_TOKENS)] = ()
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """Sample i of a job draws from a stream that is a function of (seed, i). None: the job id gives the seed."""
