"""A harness as a user would write one: takes episodes of a training run over HTTP, plays and rewards them."""

from __future__ import annotations

import random
import time
import uuid
from operator import eq
from typing import Any

import httpx
from openai import APIConnectionError, APIStatusError, NotFoundError, OpenAI

PATIENCE_S = 0.2
"""Pause before a call is repeated, in seconds."""


class Harness:
    """Plays sums: each turn asks for the same sum again, after all that was said before. Every call is repeated until
    it is answered."""

    def __init__(self, url: str, *, turns: int = 2, rewards: bool = True, truncated: bool = False) -> None:
        """`rewards`: whether it gives any. `truncated`: it says of each episode that it was cut off."""
        self.url, self.turns, self.rewards, self.truncated = url, turns, rewards, truncated
        self.given: list[float] = []
        """Rewards of the episodes that were finished."""

    def play_one(self, wait_s: float = 1.0) -> bool:
        """Plays the next episode; False if there is none."""
        taken = self._post("/v1/episodes", {"wait_s": wait_s}, key=uuid.uuid4().hex)
        if taken.status_code == 204:
            return False
        episode = taken.raise_for_status().json()
        try:
            reward = self.play(episode["session_id"], episode["task"])
            end = {"truncated": self.truncated, "metrics": {"guessed": 1}} | (
                {"reward": reward} if self.rewards else {}
            )
            ended = self._post(f"/v1/sessions/{episode['session_id']}/finish", end)
        except NotFoundError:
            return True  # it was idle for too long, or its job has ended
        if ended.status_code != 404:
            ended.raise_for_status()
            self.given.append(reward)
        return True

    def play(self, session_id: str, task: dict[str, Any]) -> float:
        """The reward: the share of the answer's digits that the last turn got right, less a little at random, so that
        every group has a signal."""
        text, said = "", ""
        for turn in range(self.turns):
            text += task["prompt"]
            said, written = self._say(session_id, text, key=f"turn-{turn}")
            text += written
        answer = task["answer"]
        return sum(map(eq, said.strip(), answer)) / len(answer) - random.random() / 100

    def _say(self, session_id: str, text: str, key: str) -> tuple[str, str]:
        """The answer, and all of its text, with that of special tokens."""
        while True:
            base_url = f"{self.url}/v1/sessions/{session_id}/v1"
            try:
                with OpenAI(base_url=base_url, api_key="none", timeout=60, max_retries=0) as client:
                    model = client.models.list().data[0].id
                    done = client.completions.create(
                        model=model, prompt=text, logprobs=1, extra_headers={"Idempotency-Key": key}
                    )
                choice = done.choices[0]
                assert choice.logprobs is not None
                return choice.text, "".join(choice.logprobs.tokens or ())
            except (APIConnectionError, APIStatusError) as error:
                if isinstance(error, APIStatusError) and error.status_code not in (429, 500, 502, 503):
                    raise
                time.sleep(PATIENCE_S)

    def _post(self, path: str, body: dict[str, Any], key: str = "") -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        while True:
            try:
                answer = httpx.post(self.url + path, json=body, headers=headers, timeout=60, trust_env=False)
                if answer.status_code not in (429, 500, 502, 503):
                    return answer
            except httpx.TransportError:
                pass
            time.sleep(PATIENCE_S)
