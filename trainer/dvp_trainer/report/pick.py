"""Picks the completions of a batch that people see, with what training did with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from dvp_rl.dvp.correction import Correction
from dvp_rl.dvp.evidence import Evidence
from dvp_rl.engines.tokenizer import Tokenizer
from dvp_trainer.data.batch import Batch
from dvp_trainer.data.prompts import Row
from dvp_trainer.learn.step import Learner

from .completions import MAX_TOKENS, Completion, Fate

T = TypeVar("T")

MAX_PROMPT = 4096
"""Most characters kept of a prompt, from its end."""
DIGITS = 4


def pick_completions(
    batch: Batch, learner: Learner, rows: Sequence[Row], tokenizer: Tokenizer, count: int
) -> list[Completion]:
    """The best and the worst sample of each group until there are `count`. The learner must have trained this batch
    last; `rows` are the rows of its groups."""
    evidence = learner.evidence
    correction = None if evidence is None else learner.correct(evidence)
    places = {} if evidence is None else {index: place for place, index in enumerate(evidence.rows.tolist())}
    found: list[Completion] = []
    first = 0
    for scored, row in zip(batch.groups, rows, strict=True):
        prompt = tokenizer.decode(scored.group.prompt_ids.tolist(), skip_special_tokens=False)
        best, worst = int(np.argmax(scored.rewards)), int(np.argmin(scored.rewards))
        for i in dict.fromkeys((best, worst)):
            sample, verdict = scored.group.samples[i], Verdict(Fate.NO_SIGNAL)
            if evidence is not None and correction is not None and first + i in places:
                verdict = _verdict(evidence, correction, places[first + i])
            found.append(
                Completion(
                    row=row.index,
                    prompt=prompt[-MAX_PROMPT:],
                    answer=row.answer,
                    reward=scored.rewards[i],
                    advantage=round(float(learner.advantages[first + i]), DIGITS),
                    fate=verdict.fate,
                    weight=verdict.weight,
                    finish_reason=sample.finish_reason,
                    num_tokens=len(sample.token_ids),
                    num_skipped=max(0, len(sample.token_ids) - MAX_TOKENS),
                    tokens=tokenizer.pieces(_ends(sample.token_ids.tolist())),
                    kept_mass=[round(mass, DIGITS) for mass in _ends(sample.kept_mass.tolist())],
                    infer_logprobs=_rounded(sample.logprobs.tolist()),
                    train_logprobs=None if verdict.logprobs is None else _rounded(verdict.logprobs),
                )
            )
        first += len(scored.rewards)
        if len(found) >= count:
            break
    return found[:count]


class Verdict(NamedTuple):
    """What the learner found for a sequence."""

    fate: Fate
    weight: float | None = None
    logprobs: list[float] | None = None


def _verdict(evidence: Evidence, correction: Correction, place: int) -> Verdict:
    veto, mask = correction.veto, evidence.mask[place]
    reasons = {Fate.NAN: veto.nan, Fate.OUTSIDE: veto.outside, Fate.RATIO: veto.numerical}
    fates = [fate for fate, dropped in reasons.items() if dropped[place]]
    fates.append(Fate.TRAINED if correction.kept_sequences[place] else Fate.REJECTED)
    weight = round(float(correction.weights[place][mask].mean()), DIGITS)
    return Verdict(fates[0], weight, evidence.train.logprobs[place][mask].tolist())


def _ends(values: list[T]) -> list[T]:
    """All values, or the first and the last MAX_TOKENS / 2."""
    half = MAX_TOKENS // 2
    return values if len(values) <= MAX_TOKENS else values[:half] + values[-half:]


def _rounded(logprobs: list[float]) -> list[float | None]:
    return [round(value, DIGITS) if math.isfinite(value) else None for value in _ends(logprobs)]
