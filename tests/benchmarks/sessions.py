"""CPU time of a session's turn: with 10 and with 1,000 sessions that play at once, and by the length of its history.

A real `dvp-rollout` process with the fake engine, a real broker with AOF, and a client that plays over HTTP, with a
connection per request. The CPU time is that of replica and broker; the client's is not counted. `sessions` and
`histories` send token ids, `dialogues` send messages. `rollout` is the same request without a session, which records
nothing: POST /v1/rollouts with the whole history.

    python -m tests.benchmarks.sessions [--many 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from dvp_rl.transport.embedded import EmbeddedBroker
from tests.kit.models import make_model
from tests.kit.replicas import ReplicaProcess

RESULTS = Path(__file__).parent / "results" / "sessions.json"
VOCAB = 32_000
FEW, MANY = 10, 1000
TURNS = 4
"""Turns per session while many play at once."""
PROMPT, DRAWN, READ = 200, 64, 16
"""Tokens of the first prompt, and those that are drawn in a turn and read after it."""
ROUNDS = 3
HISTORIES = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
REPEATS = 40
"""Turns per history."""
DIALOGUES = (1, 2, 4, 8, 16, 32, 64)
"""Turns that are measured, in each of NUM_DIALOGUES."""
NUM_DIALOGUES = 20
QUESTION = {"role": "user", "content": "What is 1 + 1?"}
SERVICE_S = 0.02
GOAL = 1.2
RUN = "bench"


@dataclass(frozen=True)
class Client:
    http: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    async def open(self) -> str:
        """Its path."""
        opened = await self.post("/v1/sessions", sampling={"max_tokens": DRAWN})
        return f"/v1/sessions/{opened['session_id']}"

    async def turn(self, session: str, token_ids: list[int]) -> list[int]:
        """The prompt of the next turn."""
        answer = await self.post(f"{session}/inference/v1/generate", token_ids=token_ids)
        return [*token_ids, *answer["choices"][0]["token_ids"], *[20] * READ]

    async def chat(self, session: str, messages: list[Any]) -> tuple[list[Any], int]:
        """The messages of the next turn, and the number of tokens in the prompt of this one."""
        answer = await self.post(f"{session}/v1/chat/completions", model=RUN, messages=messages)
        return [*messages, answer["choices"][0]["message"], QUESTION], answer["usage"]["prompt_tokens"]

    async def rollout(self, token_ids: list[int]) -> None:
        await self.post("/v1/rollouts", prompt_ids=token_ids, n=1, sampling={"max_tokens": DRAWN})

    async def play(self) -> None:
        session, token_ids = await self.open(), [20] * PROMPT
        for _ in range(TURNS):
            token_ids = await self.turn(session, token_ids)
        await self.http.delete(session)


class Costs:
    """CPU milliseconds of replica and broker."""

    def __init__(self, *pids: int) -> None:
        self._tasks = [Path(f"/proc/{pid}/task") for pid in pids]

    def _read(self) -> float:
        """The kernel's clock of each thread counts nanoseconds; that of a process ticks too slowly for few turns."""
        clocks = (clock for tasks in self._tasks for clock in tasks.glob("*/schedstat"))
        return sum(int(clock.read_text().split()[0]) for clock in clocks) / 1e6

    async def of(self, work: Awaitable[object]) -> float:
        before = self._read()
        await work
        return self._read() - before


async def compare_numbers(client: Client, costs: Costs, many: int) -> dict[str, Any]:
    """Milliseconds per turn, as many of them in either case. They include a share of opening and deleting a session."""

    async def play(num: int) -> None:
        for _ in range(many // num):
            await asyncio.gather(*(client.play() for _ in range(num)))

    spent: dict[int, list[float]] = {FEW: [], many: []}
    for number in range(-1, ROUNDS):
        for num in (FEW, many) if number % 2 else (many, FEW):
            cost = await costs.of(play(num)) / (many * TURNS)
            if number >= 0:
                spent[num].append(cost)
    ratio = median(b / a for a, b in zip(spent[FEW], spent[many], strict=True))
    return {"at_once": [FEW, many], "ms_per_turn": [median(spent[FEW]), median(spent[many])], "ratio": ratio}


async def compare_histories(client: Client, costs: Costs) -> list[dict[str, Any]]:
    """The second turn of a session whose first prompt has that many tokens."""
    spent = {length: {"turn": [], "rollout": [], "ms": []} for length in HISTORIES}
    for _ in range(REPEATS):
        for length, own in spent.items():
            session = await client.open()
            token_ids = await client.turn(session, [20] * length)
            start = time.perf_counter()
            own["turn"].append(await costs.of(client.turn(session, token_ids)))
            own["ms"].append(1e3 * (time.perf_counter() - start - SERVICE_S))
            own["rollout"].append(await costs.of(client.rollout(token_ids)))
            await client.http.delete(session)
    return [
        {
            "tokens": length,
            "turn_cpu_ms": median(own["turn"]),
            "rollout_cpu_ms": median(own["rollout"]),
            "ratio": median(a / b for a, b in zip(own["turn"], own["rollout"], strict=True)),
            "turn_ms": median(own["ms"]),
        }
        for length, own in spent.items()
    ]


async def compare_dialogues(client: Client, costs: Costs) -> list[dict[str, Any]]:
    """Turns of a dialogue. A client sends all messages each time."""
    spent: dict[int, list[tuple[int, float]]] = {turn: [] for turn in DIALOGUES}
    for _ in range(NUM_DIALOGUES):
        session, messages = await client.open(), [QUESTION]
        for turn in range(1, DIALOGUES[-1] + 1):
            asked = asyncio.ensure_future(client.chat(session, messages))
            cost = await costs.of(asked)
            messages, num_tokens = asked.result()
            if turn in spent:
                spent[turn].append((num_tokens, cost))
        await client.http.delete(session)
    return [
        {"turn": turn, "tokens": num_tokens, "turn_cpu_ms": cost}
        for turn, own in spent.items()
        for num_tokens, cost in [map(float, np.median(own, axis=0))]
    ]


def line(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The straight line closest to the rows, and the distance of the row furthest from it."""
    tokens, cost = np.array([(row["tokens"], row["turn_cpu_ms"]) for row in rows]).T
    slope, start = np.polyfit(tokens, cost, 1)
    furthest = np.abs(start + slope * tokens - cost).max()
    return {"ms": float(start), "ms_per_1000_tokens": 1e3 * float(slope), "furthest_ms": float(furthest)}


async def measure(url: str, costs: Costs, many: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=many, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as http:
        client = Client(http)
        numbers, histories = await compare_numbers(client, costs, many), await compare_histories(client, costs)
        dialogues = await compare_dialogues(client, costs)
    return {
        "goal": GOAL,
        "sessions": numbers,
        "turn_cpu_ms": line(histories),
        "histories": histories,
        "chat_turn_cpu_ms": line(dialogues),
        "dialogues": dialogues,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", type=int, default=MANY, help="sessions that play at once")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, EmbeddedBroker(Path(name) / "broker", aof=True) as broker:
        model = make_model(Path(name) / "model", vocab_size=VOCAB, hidden=8, heads=2, kv_heads=1, context=100_000)
        options = ["--model", str(model), "--engine", "fake", "--redis-url", broker.url, "--run-id", RUN]
        options += ["--max-batch", str(given.many), "--max-waiting", str(given.many), "--max-context", "100000"]
        options += ["--max-requests", str(2 * given.many)]
        options += ["--fake.service-time-s", str(SERVICE_S), "--fake.num-tokens", str(DRAWN)]
        with ReplicaProcess(Path(name) / "replica", *options) as replica:
            assert broker.pid is not None
            result = asyncio.run(measure(replica.url, Costs(replica.pid, broker.pid), given.many))
    print(json.dumps(result, indent=2))
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
