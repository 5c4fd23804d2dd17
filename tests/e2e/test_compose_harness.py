"""`docker compose up` with the profile `harness`: containers play the demo's episodes in an environment of the user."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.images import documented_variables

from .stack import BUILD_S, Stack, clone, require_engine, running

TRAINING_S = 900.0
STEPS = 8
PACKAGE = "roman==5.1"
OWN = '''
import roman

from deploy.demo.calculator.environment import Calculator


class Roman(Calculator):
    """Needs a package that no other image has."""

    def reset(self, row):
        assert roman.fromRoman("XLII") == 42
        return super().reset(row)
'''

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_S + TRAINING_S)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    require_engine()
    variables = documented_variables()
    stack = Stack(clone(tmp_path / "clone"), "-harness", variables["DVP_CONFIG"])
    (stack.config.parent / "own.py").write_text(OWN)
    variables["DVP_ENVIRONMENT"] = "deploy.demo.calculator.own:Roman"
    stack.environment |= variables | {"HARNESS_PACKAGES": PACKAGE}
    stack.set_steps(STEPS)
    with running(stack, "--scale=rollout=2"):
        yield stack


def test_an_agent_is_trained_while_harness_and_gateway_are_killed(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.environment["HARNESS_REPLICAS"] = "2"
    stack.compose("up", "-d", "--no-deps", "harness")
    assert (len(stack.containers("harness")), len(stack.containers("rollout"))) == (2, 2)
    for service in ("harness", "gateway"):
        goal = min(stack.step() + 1, STEPS)
        stack.wait_until(lambda goal=goal: stack.step() >= goal, f"step {goal} is done", TRAINING_S)
        stack.kill(stack.containers(service)[0])
    metrics, accounting = stack.ended_run("calculator", tmp_path, TRAINING_S)
    logs = stack.compose("logs", "--no-log-prefix", "harness")
    rewards = [record["reward/mean"] for record in metrics]
    accounting |= {
        "reward of each step": [round(reward, 3) for reward in rewards],
        "turns per episode": [round(record["episodes/turns_mean"], 2) for record in metrics],
        "killed and back": ", ".join(stack.killed),
    }
    with capsys.disabled():
        sys.stdout.write(f"\n{json.dumps(accounting, indent=2)}\n")
    assert (accounting["steps"], accounting["lost"], accounting["trained twice"]) == (STEPS, 0, 0)
    assert rewards[-1] > rewards[0] + 0.1
    assert all(record["episodes/turns_mean"] > 1 for record in metrics)
    assert "cannot be played" not in logs
    for harness in stack.containers("harness"):
        networks = stack.inspect(harness)["NetworkSettings"]["Networks"]
        assert networks.keys() == {f"{stack.project}_api"}
