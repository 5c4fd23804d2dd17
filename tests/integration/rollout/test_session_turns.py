"""What the engine reads of a session's turns."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.integration.rollout.test_sessions import opened
from tests.kit.models import make_model
from tests.kit.replicas import ReplicaProcess

TEXT, NEW = [5 + i % 80 for i in range(150)], [14, 24]
MAX_TOKENS = 8


def check_next_turn(replica: ReplicaProcess, block: int = 1) -> None:
    """The engine reads the new tokens, and the last one that it drew, and before these what fills no whole `block`."""
    with opened(replica, sampling={"max_tokens": MAX_TOKENS}) as session:

        def draw(token_ids: list[int]) -> tuple[list[int], float, float]:
            """All tokens, and how many were read and cached."""
            before = replica.prompt_tokens()
            answer = session.post("inference/v1/generate", token_ids=token_ids)
            assert answer.status_code == 200, answer.text
            after = replica.prompt_tokens()
            drawn = answer.json()["choices"][0]["token_ids"]
            return [*token_ids, *drawn], after["read"] - before["read"], after["cached"] - before["cached"]

        first, read, _ = draw(TEXT)
        assert read > len(TEXT) / 2, "nobody read this text before"
        prompt = [*first, *NEW]
        _, read, cached = draw(prompt)
        known = (len(first) - 1) // block * block
        assert (read, cached) == (len(prompt) - known, known)


def test_the_next_turn_reads_only_what_is_new(broker_url: str, tmp_path: Path) -> None:
    run_id, model = f"turns-{secrets.token_hex(6)}", make_model(tmp_path / "model", endless=True)
    args = ["--model", str(model), "--redis-url", broker_url, "--run-id", run_id, "--threads", "1"]
    with ReplicaProcess(tmp_path / "replica", *args) as replica:
        check_next_turn(replica)
