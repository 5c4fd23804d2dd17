"""The signature of a recorded run, from the tokens that it trained on; a record holds no logits.

Delta is that of the full policies, log pi = log pi_mp + log Z. Tokens were drawn from the engine's constrained policy;
only those in both safe sets count. Sums over the vocabulary are estimated from the tokens: C = sum_k p_k^2 as the mean
probability of a drawn token, s from the KL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dvp_rl.dvp.evidence import Evidence
from dvp_trainer.report.token_log import read_tokens

from .mismatch import EDGES, SIGMAS, Estimate, difference, ratio
from .signature import BUCKETS, Distance, bucket_chart, conclusion
from .study import Finding, Study, Table, short

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class Tokens(NamedTuple):
    """Drawn tokens that are in both safe sets, [N, T] each."""

    mask: Bool[Tensor, "N T"]
    delta: Float[Tensor, "N T"]
    train: Float[Tensor, "N T"]
    """log pi_train."""
    infer: Float[Tensor, "N T"]

    @classmethod
    def of(cls, evidence: Evidence) -> Tokens:
        mask = evidence.mask & evidence.train.inside
        train, infer = (
            side.logprobs.double() + side.kept_mass.double().log() for side in (evidence.train, evidence.infer)
        )
        return cls(mask, (train - infer).where(mask, 0.0), train, infer)


class Noise(NamedTuple):
    kl: float
    """The K3 estimate of the KL per token."""
    C: float
    """Mean over positions of sum_k p_k^2."""

    @classmethod
    def of(cls, batches: Sequence[Tokens]) -> Noise:
        delta = torch.cat([batch.delta[batch.mask] for batch in batches])
        infer = torch.cat([batch.infer[batch.mask] for batch in batches])
        return cls(float((delta.exp() - 1 - delta).mean()), float(infer.exp().mean()))

    @property
    def s2(self) -> float:
        return 2 * self.kl / (1 - self.C) if self.C < 1 else 0.0

    def sampled(self, p: Tensor) -> Tensor:
        """The prediction m - v."""
        return self.control(p) - self.s2 * ((1 - p).square() + self.C - p.square())

    def control(self, p: Tensor) -> Tensor:
        """The prediction m."""
        return torch.full_like(p, self.s2 * (1 - self.C) / 2)


class Row(NamedTuple):
    """One bucket of pi_train: like mismatch.Bucket, but from drawn tokens."""

    number: int
    tokens: int
    sampled: Estimate
    control: Estimate
    contrast: Estimate
    predicted_sampled: float
    predicted_control: float

    @property
    def predicted_contrast(self) -> float:
        return self.predicted_sampled - self.predicted_control


def recorded_signature(run: Path) -> Study:
    evidence = list(read_tokens(run))
    batches = [Tokens.of(part) for part in evidence]
    drawn = sum(int(part.mask.sum()) for part in evidence)
    outside = sum(int((part.mask & ~part.train.inside).sum()) for part in evidence)
    noise = Noise.of(batches)
    rows = list(_rows(batches, noise))
    return Study(
        name="signature",
        title=f"The signature of the mismatch in {run.name}",
        abstract="Delta = log pi_train - log pi_infer of the tokens that the run trained on, both policies without "
        "pruning, by bucket of pi_train. Means over drawn tokens; the control weighs each with its ratio.",
        settings={
            "run": run.name,
            "batches": len(batches),
            "tokens": drawn,
            "intervals": f"{SIGMAS:g} standard errors over sequences",
        },
        findings=(
            Finding("KL(infer || train) per token, and the s of iid noise with this KL.", None, _of_noise(noise)),
            Finding("Tokens outside of the trainer's safe set, left out.", None, f"{outside} of {drawn:,}"),
            *(_finding(row) for row in rows if row.tokens >= 100),
        ),
        charts=(bucket_chart(run.name, noise.s2, [row.number for row in rows], rows),) if noise.s2 > 0 else (),
        tables=(_table(rows),),
        notes=(
            "Tokens were drawn under pruning. Near the threshold, those that noise carried out of the trainer's set "
            "are missing, which moves the means there up; the sign proves nothing there.",
            "With stale samples, Delta also holds what training changed since they were drawn.",
        ),
        conclusion=conclusion([Distance.of(run.name, *((batch.delta, batch.mask) for batch in batches))])
        if rows
        else (),
    )


def _rows(batches: Sequence[Tokens], noise: Noise) -> Iterator[Row]:
    for number in range(len(EDGES) - 1):
        parts = [_sums(batch, number, noise) for batch in batches]
        count, delta, weight, weighted, sampled, control = (torch.cat(column) for column in zip(*parts, strict=True))
        if count.sum():
            yield Row(
                number,
                int(count.sum()),
                ratio(delta, count),
                ratio(weighted, weight),
                difference((delta, count), (weighted, weight)),
                ratio(sampled, count).value,
                ratio(control, weight).value,
            )


def _sums(tokens: Tokens, number: int, noise: Noise) -> tuple[Tensor, ...]:
    """The number of tokens in the bucket and the sums over them, per sequence."""
    p = tokens.train.exp()
    own = tokens.mask & (p >= EDGES[number]) & ((p < EDGES[number + 1]) | (number == len(EDGES) - 2))
    r = tokens.delta.exp()
    values = (torch.ones_like(p), tokens.delta, r, r * tokens.delta, noise.sampled(p), r * noise.control(p))
    return tuple(value.where(own, 0.0).sum(1) for value in values)


def _of_noise(noise: Noise) -> str:
    return f"{short(noise.kl)}, s = {short(math.sqrt(max(noise.s2, 0.0)))} (C = {noise.C:.2f})"


def _finding(row: Row) -> Finding:
    return Finding(
        f"pi_train {BUCKETS[row.number]}: contrast of sampled and pi_train-weighted mean, against -v.",
        None,
        f"{row.contrast} against {short(row.predicted_contrast)}, {row.tokens:,} tokens",
    )


def _table(rows: Sequence[Row]) -> Table:
    return Table(
        "By bucket of pi_train",
        "Predictions are for iid noise of the run's s.",
        ("pi_train", "tokens", "sampled", "m − v", "control", "m", "contrast", "−v"),
        tuple(
            (
                *(BUCKETS[row.number], row.tokens, str(row.sampled), row.predicted_sampled),
                *(str(row.control), row.predicted_control, str(row.contrast), row.predicted_contrast),
            )
            for row in rows
        ),
    )
