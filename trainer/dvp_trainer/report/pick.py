"""Picks the completions of a batch that people see, with what training did with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dvp_rl.contract.completions import MAX_TOKENS, Completion, Fate
from dvp_rl.contract.group import FinishReason, Sample
from dvp_rl.dvp.correction import Correction
from dvp_rl.engines.tokenizer import Tokenizer
from dvp_trainer.data.batch import Batch
from dvp_trainer.data.prompts import Row
from dvp_trainer.learn.step import Learner
from dvp_trainer.options import Overlong

T = TypeVar("T")

MAX_PROMPT = 4096
"""Most characters kept of a prompt, from its end."""
DIGITS = 4


def pick_completions(
    batch: Batch, learner: Learner, rows: Sequence[Row], tokenizer: Tokenizer, *, updated: bool
) -> list[Completion]:
    """The best and the worst episode of each group, each with its last sample, until there are report.completions. The
    learner must have trained this batch last; `rows` are the rows of its groups, and `updated` says whether it made a
    step."""
    look, count = Look(learner, updated), learner.settings.report.completions
    found: list[Completion] = []
    first = 0
    for scored, row in zip(batch.groups, rows, strict=True):
        episodes = scored.group.episodes
        best, worst = int(np.argmax(scored.rewards)), int(np.argmin(scored.rewards))
        for i in dict.fromkeys((best, worst)):
            *forks, sample = episodes[i]
            verdict, is_model = look.at(first + i, sample), sample.is_model
            prompt_ids = sample.continues(scored.group.prompt_ids)
            prompt = tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False)
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
                    kept_mass=_per_token(sample.kept_mass.tolist(), is_model),
                    infer_logprobs=_per_token(sample.logprobs.tolist(), is_model),
                    train_logprobs=None if verdict.logprobs is None else _per_token(verdict.logprobs, is_model),
                    num_environment=len(is_model) - sample.num_model_tokens,
                    num_forks=len(forks),
                )
            )
        first += len(scored.rewards)
        if len(found) >= count:
            break
    return found[:count]


class Verdict(NamedTuple):
    """What the learner did with an episode."""

    fate: Fate
    weight: float | None = None
    logprobs: list[float] | None = None
    """Of the model tokens of its last sample."""


class Look:
    """A look at what the learner did with its last batch."""

    def __init__(self, learner: Learner, updated: bool) -> None:
        self._settings, self._updated = learner.settings, updated
        self._evidence = evidence = learner.update_evidence
        self._correction = None if evidence is None else learner.correct(evidence)
        self._places = {} if evidence is None else {row: place for place, row in enumerate(evidence.rows.tolist())}

    def at(self, index: int, sample: Sample) -> Verdict:
        """The verdict on the episode at this row of the batch, which ends with `sample`."""
        if index not in self._places:
            return Verdict(Fate.NO_SIGNAL)
        assert self._evidence is not None
        assert self._correction is not None
        place = self._places[index]
        mask = self._evidence.mask[place]
        weight = round(float(self._correction.weights[place][mask].mean()), DIGITS)
        logprobs: list[float] = self._evidence.train.logprobs[place][mask].tolist()
        fate = self._fate(self._correction, place, sample)
        return Verdict(fate, weight, logprobs[-sample.num_model_tokens :])

    def _fate(self, correction: Correction, place: int, sample: Sample) -> Fate:
        veto, overlong = correction.veto, self._settings.reward.overlong in (Overlong.MASK, Overlong.DROP)
        reasons = {
            Fate.TOO_LONG: overlong and sample.finish_reason is FinishReason.LENGTH,
            Fate.OWN: self._settings.correction.objective is not None,
            Fate.NAN: veto.nan[place],
            Fate.OUTSIDE: veto.outside[place],
            Fate.RATIO: veto.numerical[place],
            Fate.REJECTED: not correction.kept_sequences[place],
            Fate.NO_STEP: not self._updated,
        }
        return next((fate for fate, applies in reasons.items() if applies), Fate.TRAINED)


def _ends(values: list[T]) -> list[T]:
    """All values, or the first and the last MAX_TOKENS / 2."""
    half = MAX_TOKENS // 2
    return values if len(values) <= MAX_TOKENS else values[:half] + values[-half:]


def _per_token(values: list[float], is_model: NDArray[np.bool_]) -> list[float | None]:
    """The values of the model tokens, with None for each token of the environment and for what is not finite."""
    known = iter(values)
    found = [next(known) if own else math.nan for own in is_model]
    return [round(value, DIGITS) if math.isfinite(value) else None for value in _ends(found)]
