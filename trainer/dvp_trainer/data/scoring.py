"""Scores completions, in groups."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from dvp_rl.contract.group import FinishReason, Group
from dvp_rl.engines.tokenizer import Tokenizer
from dvp_rl.hooks import is_hook
from dvp_trainer.config import RewardSection
from dvp_trainer.options import Overlong, RewardName

from .batch import ScoredGroup
from .prompts import Row
from .reward_failures import RewardFailures
from .reward_forms import Form
from .reward_pool import RewardPool, RewardRequest, RewardResult
from .rewards import overlong_penalty

log = logging.getLogger(__name__)


class Scorer:
    """Scores whole groups in worker processes."""

    def __init__(self, pool: RewardPool, tokenizer: Tokenizer, rules: RewardSection, failures: RewardFailures) -> None:
        self._pool, self.tokenizer, self._rules, self._failures = pool, tokenizer, rules, failures
        self.num_waiting = self.num_groups = 0
        """Numbers of completions that await their rewards, and of their groups."""

    async def score(self, group: Group, row: Row) -> ScoredGroup:
        """The group with its rewards; a failed one counts as 0. An episode gets what its harness gave it, or else the
        reward of its last sample.

        Raises ConfigError as RewardFailures.look_at does."""
        arrived = time.monotonic()
        token_ids = [last.token_ids.tolist() for *_, last in group.episodes]
        completions = [self.tokenizer.decode(ids) for ids in token_ids]
        given = self._given(group)
        results = [RewardResult(value, None, 0.0) for value in given]
        if None in given:
            self.num_waiting, self.num_groups = self.num_waiting + len(completions), self.num_groups + 1
            try:
                computed = await self._pool.score(self._pool.requests(row, completions, token_ids))
            finally:
                self.num_waiting, self.num_groups = self.num_waiting - len(completions), self.num_groups - 1
            results = [own if own.value is not None else ours for own, ours in zip(results, computed, strict=True)]
        self._failures.look_at(row, completions, results)
        return ScoredGroup(
            group=group,
            rewards=self._shaped(group, [result.value or 0.0 for result in results]),
            staleness=0,
            num_failed=sum(result.value is None for result in results),
            reward_s=sum(result.seconds for result in results),
            arrived=arrived,
        )

    def _given(self, group: Group) -> list[float | None]:
        """What the harness gave each episode. Where only it gives rewards, 0 to one that was cut off without any."""
        ends = [last.finish_reason for *_, last in group.episodes]
        rewards = group.rewards or (None,) * len(ends)
        if self._rules.name != RewardName.GIVEN:
            return [*rewards]
        cut_off = [end is FinishReason.LENGTH for end in ends]
        return [0.0 if reward is None and cut else reward for reward, cut in zip(rewards, cut_off, strict=True)]

    def waiting(self) -> str:
        """What scoring waits for, in words; "" for nothing."""
        if not self.num_waiting:
            return ""
        return (
            f"{self.num_waiting} completions await rewards (reward.workers = {self._rules.workers}); "
            f"{self._failures.num_timed_out} took longer than reward.timeout_s = {self._rules.timeout_s:g} s so far"
        )

    async def try_on(self, rows: Sequence[Row], n: int) -> None:
        """Scores each row's answer as if it were a completion. TRL's form gets a group of `n`, in which every other
        text is empty. Raises ConfigError if every reward fails; warns if empty completions would get no less."""
        if self._rules.name == RewardName.GIVEN:
            return
        num, source = 1 if self._pool.form is Form.OWN else n, self._failures.source
        answers = [(row.answer or "").encode(errors="replace").decode() for row in rows]
        requests, results = await self._try(rows, [([answer, ""] * num)[:num] for answer in answers])
        if all(result.value is None for result in results):
            what = f"failed for the answers of {len(rows)} rows, tried as completions before the run"
            raise self._failures.fatal(what, rows[0], requests[0].completions[0], results[0])
        values = [result.value for result in results[::num]]
        shown = ", ".join("failed" if value is None else f"{value:g}" for value in values)
        log.info("%s: rewards of the answers of %d rows, tried as completions: %s", source, len(rows), shown)
        unpaid = is_hook(self._rules.name) and all(answers) and max(value or 0.0 for value in values) <= 0
        if unpaid and (num > 1 or self._pool.form is Form.OWN):
            empty = results[1::num] if num > 1 else (await self._try(rows, [[""] for _ in rows]))[1]
            pairs = [(value, result.value) for value, result in zip(values, empty, strict=True)]
            if all(value is not None and nothing is not None and value <= nothing for value, nothing in pairs):
                log.warning(
                    "%s: no answer gets more than an empty completion: is the reward right? It may be, if a completion "
                    "must be more than its answer",
                    source,
                )

    async def _try(
        self, rows: Sequence[Row], texts: Sequence[Sequence[str]]
    ) -> tuple[list[RewardRequest], list[RewardResult]]:
        """Scores these completions of each row."""
        requests = [
            request
            for row, completions in zip(rows, texts, strict=True)
            for request in self._pool.requests(row, completions, [self.tokenizer.encode(text) for text in completions])
        ]
        return requests, await self._pool.score(requests)

    def _shaped(self, group: Group, rewards: Sequence[float]) -> tuple[float, ...]:
        if self._rules.overlong is not Overlong.SOFT:
            return tuple(rewards)
        limit = group.sampling.max_tokens
        lengths = [last.num_in_last_turn for *_, last in group.episodes]
        pairs = zip(rewards, lengths, strict=True)
        return tuple(reward + overlong_penalty(length, limit, self._rules.overlong_buffer) for reward, length in pairs)
