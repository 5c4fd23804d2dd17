"""Converts prompts to token ids and completions to rewards."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dvp_rl.contract.group import Group
from dvp_rl.engines.tokenizer import Tokenizer
from dvp_trainer.config import RewardSection
from dvp_trainer.options import Overlong

from .batch import ScoredGroup
from .prompts import Prompt, Prompts, Row
from .reward_pool import RewardPool, RewardRequest, reward_values
from .rewards import overlong_penalty

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> NDArray[np.int32]:
    """Token ids of a prompt. Chat messages go through the model's template, up to the start of the assistant's turn."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
    return np.array(ids, np.int32)


class PromptTokens:
    """Rows of the data set and their token ids, by position."""

    def __init__(self, prompts: Prompts, tokenizer: Tokenizer) -> None:
        self.row, self.fingerprint = prompts.row_at, prompts.fingerprint
        self._tokenizer = tokenizer
        self.token_ids = lru_cache(maxsize=65_536)(self._token_ids)

    def _token_ids(self, position: int) -> NDArray[np.int32]:
        return encode_prompt(self._tokenizer, self.row(position).prompt)


class Scorer:
    """Scores whole groups in worker processes."""

    def __init__(self, pool: RewardPool, tokenizer: Tokenizer, rules: RewardSection) -> None:
        self._pool, self.tokenizer, self._rules = pool, tokenizer, rules
        self._warned = False

    async def score(self, group: Group, row: Row) -> ScoredGroup:
        """The group with its rewards. Raises ConfigError if a reward fails and on_error is `stop`."""
        arrived = time.monotonic()
        completions = [self.tokenizer.decode(sample.token_ids.tolist()) for sample in group.samples]
        requests = [RewardRequest(row.index, text, row.answer, row.text, row.extra) for text in completions]
        results = await self._pool.score(requests)
        scores = reward_values(results, self._rules.on_error)
        self._warn_once([result.error for result in results if result.error is not None])
        return ScoredGroup(
            group=group,
            rewards=self._shaped(group, scores),
            staleness=0,
            num_failed=sum(result.value is None for result in results),
            reward_s=sum(result.seconds for result in results),
            arrived=arrived,
        )

    def _warn_once(self, errors: Sequence[str]) -> None:
        """Logs row and error type of the first failure; the error's message may contain the prompt."""
        if errors and not self._warned:
            self._warned = True
            first = ": ".join(errors[0].split(": ")[:2])
            log.warning("a reward failed and counts as 0 (%s); further failures are counted in reward/failed", first)

    def _shaped(self, group: Group, rewards: Sequence[float]) -> tuple[float, ...]:
        if self._rules.overlong is not Overlong.SOFT:
            return tuple(rewards)
        limit = group.sampling.max_tokens
        lengths = [len(sample.token_ids) for sample in group.samples]
        pairs = zip(rewards, lengths, strict=True)
        return tuple(reward + overlong_penalty(length, limit, self._rules.overlong_buffer) for reward, length in pairs)
