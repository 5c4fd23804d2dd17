"""The canary of a weight version: what its weights draw, and how likely that is, as the trainer computes it.

No label and no checksum tells which weights an engine computes with. A replica draws the same tokens before it lets a
version work: see dvp_rl.rollout.canary.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from .record import Record

CANARY_NAME = "dvp-canary.json"
"""Its file in the folder of a version."""
MAX_WALKS = 64
MAX_WALK = 4096
MAX_CANARY_BYTES = 4 << 20

TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1, max_length=MAX_WALK)]
Nats = Annotated[tuple[float, ...], Field(max_length=MAX_WALK)]
PRECISION = ("float64", "float32", "float16", "bfloat16")
"""Number formats, the most precise first."""


def coarser(*dtypes: str) -> str:
    """The least precise of these number formats; an unknown one counts as the coarsest."""
    return max(dtypes, key=lambda dtype: PRECISION.index(dtype) if dtype in PRECISION else len(PRECISION))


class Margin(NamedTuple):
    """Nats by which a logit may differ between a trainer and an engine, one of which computes in a format, the other in
    none that is less precise."""

    nats: float
    dtypes: tuple[str, ...]


MARGINS = (
    Margin(0.02, ("float64", "float32")),  # kernels for float32 may multiply in TF32
    Margin(0.25, ("float16",)),
    Margin(1.0, ()),  # all others: logits between 32 and 64 are 0.25 apart in bfloat16
)


def margin_of(dtype: str) -> int:
    """Its place in MARGINS."""
    return next((place for place, each in enumerate(MARGINS) if dtype in each.dtypes), len(MARGINS) - 1)


class Walk(Record):
    """A prompt and its continuation, T times by the most likely token."""

    prompt_ids: TokenIds
    token_ids: TokenIds
    """[T]."""
    logprobs: Nats
    """[T] log softmax(z) of each token over the whole vocabulary, in nats."""
    gaps: Nats
    """[T] How far the next best token lies below, in nats."""
    kept: Annotated[tuple[tuple[int, int], ...], Field(min_length=len(MARGINS), max_length=len(MARGINS))]
    """Fewest and most tokens that the run's policy may keep right after the prompt, by each of MARGINS."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not len(self.token_ids) == len(self.logprobs) == len(self.gaps):
            raise ValueError("token_ids, logprobs and gaps differ in length")
        return self


class Canary(Record):
    """Walks of one version's weights."""

    dtype: str
    """The least precise number format that the trainer used: in its forward, or for the weights that it published."""
    rounded: bool = False
    """Whether the published weights are less precise than those that gave the walks."""
    log_min_p: float
    temperature: float
    """The run's policy, for `Walk.kept`."""
    walks: Annotated[tuple[Walk, ...], Field(min_length=1, max_length=MAX_WALKS)]
