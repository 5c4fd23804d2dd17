"""docker-compose.yml as far as that can be told without an engine; tests/e2e/test_compose.py runs it.

compose-spec.json is the schema of the Compose specification, from github.com/compose-spec/compose-go 2.4.8, Apache-2.0.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from services.rollout.settings import RolloutSettings
from trainer.config import TrainSettings

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "deploy" / "docker"
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?::([-?])([^}]*))?\}")
ASSIGNMENT = re.compile(r"^#?([A-Z_]+)=(.*)$", re.MULTILINE)

TEXT = (REPOSITORY / "docker-compose.yml").read_text()
EXAMPLE = (REPOSITORY / ".env.example").read_text()
DEFAULTS = {name: value for name, value in ASSIGNMENT.findall(EXAMPLE) if f"\n{name}=" in EXAMPLE}


def resolve(variables: dict[str, str]) -> dict[str, Any]:
    """The file with its variables put in, as compose would."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if not variables.get(name) and operator == "?":
            raise KeyError(name)
        return variables.get(name) or rest or ""

    resolved: dict[str, Any] = yaml.safe_load(VARIABLE.sub(value, re.sub(r"#.*", "", TEXT)))
    return resolved


FILE = resolve(DEFAULTS)
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
EVERY = pytest.mark.parametrize("service", SERVICES.values(), ids=list(SERVICES))


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


def test_file_follows_the_compose_specification() -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"  # the schema's own has a typing error
    jsonschema.Draft7Validator(schema).validate(FILE)
    with pytest.raises(jsonschema.ValidationError, match="restrat"):
        jsonschema.Draft7Validator(schema).validate({"services": {"redis": {"restrat": "always"}}})


@EVERY
def test_containers_are_hardened_and_bounded(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory", "pids"}
    assert "container_name" not in service
    assert "privileged" not in service


@pytest.mark.parametrize("name", SERVICES)
def test_containers_restart_by_themselves(name: str) -> None:
    """A trainer that is done stays so."""
    assert SERVICES[name]["restart"] == ("on-failure" if name.startswith("trainer") else "unless-stopped")


def test_only_the_gateway_is_published_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"gateway": ["127.0.0.1:8000:8000"]}


def test_broker_is_out_of_the_gateways_reach() -> None:
    assert not set(SERVICES["gateway"]["networks"]) & set(SERVICES["redis"]["networks"])


def test_start_waits_for_health() -> None:
    waits = [wait for service in SERVICES.values() for wait in service.get("depends_on", {}).values()]
    assert len(waits) >= 5
    assert all(wait["condition"] == "service_healthy" for wait in waits)


def test_stop_leaves_time_to_drain() -> None:
    for name in ("rollout", "rollout-gpu"):
        service = SERVICES[name]
        assert seconds(service["stop_grace_period"]) > service["environment"]["DVP_ROLLOUT__DRAIN_S"] + 5
    hard_stop = re.search(r"hard-stop-after (\d+)s", (DOCKER / "haproxy.cfg").read_text())
    assert hard_stop is not None
    assert seconds(SERVICES["gateway"]["stop_grace_period"]) > int(hard_stop[1])


@pytest.mark.parametrize("secret", ["DVP_API_TOKEN", "REDIS_PASSWORD"])
def test_without_a_secret_nothing_starts(secret: str) -> None:
    with pytest.raises(KeyError, match=secret):
        resolve(DEFAULTS | {secret: ""})


def test_example_lists_every_variable() -> None:
    used = {name for name, _, _ in VARIABLE.findall(TEXT)}
    listed = {name for name, _ in ASSIGNMENT.findall(EXAMPLE)} - {"COMPOSE_PROFILES"}
    assert listed == used


def test_example_states_the_defaults() -> None:
    """What is commented out there shows what applies."""
    stated = dict(re.findall(r"^#([A-Z_]+)=(.*)$", EXAMPLE, re.MULTILINE))
    switches = {"COMPOSE_PROFILES", "CPU_REPLICAS", "CPU_TRAINERS"}
    defaults = {name: default for name, _, default in VARIABLE.findall(TEXT)}
    assert {name: defaults[name] for name in stated.keys() - switches} == {
        name: value for name, value in stated.items() if name not in switches
    }


@pytest.mark.parametrize("name", ["rollout", "rollout-gpu"])
def test_replicas_understand_their_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(name, monkeypatch)
    settings = RolloutSettings.load([])
    assert settings.tokens() == ("change-me",)
    assert settings.redis_url == "redis://:change-me@redis:6379/0"
    assert settings.device == ("cuda" if name == "rollout-gpu" else "cpu")


@pytest.mark.parametrize("name", ["trainer", "trainer-gpu"])
def test_trainers_understand_their_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(name, monkeypatch)
    settings = TrainSettings.load([], REPOSITORY / SERVICES[name]["command"][0])
    assert settings.run_id == SERVICES["rollout"]["environment"]["DVP_ROLLOUT__RUN_ID"]
    assert settings.out_dir == Path("/runs/demo")
    assert settings.weights_folder == Path("/weights")
    assert settings.model.device == ("cuda" if name == "trainer-gpu" else "cpu")


def set_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(key, str(value))


def test_weights_are_written_by_trainers_only() -> None:
    mounts = {
        name: volume.get("read_only", False)
        for name, service in SERVICES.items()
        for volume in service.get("volumes", ())
        if volume["source"] == "weights"
    }
    assert mounts == {"rollout": True, "rollout-gpu": True, "trainer": False, "trainer-gpu": False}


def test_gpu_profile_reserves_devices_and_takes_the_place_of_the_cpus() -> None:
    gpu = {name: service for name, service in SERVICES.items() if "profiles" in service}
    assert gpu.keys() == {"rollout-gpu", "trainer-gpu"}
    for service in gpu.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert gpu["rollout-gpu"]["networks"]["api"]["aliases"] == ["rollout"]
    without = resolve(DEFAULTS | {"CPU_REPLICAS": "0", "CPU_TRAINERS": "0"})["services"]
    assert [without[name]["deploy"]["replicas"] for name in ("rollout", "trainer")] == [0, 0]


def test_images_install_only_what_is_pinned() -> None:
    command = [sys.executable, str(DOCKER / "wanted.py"), "pyproject.toml", "torch", "trainer"]
    wanted = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    pinned = {canonical(line) for line in (REPOSITORY / "requirements.lock").read_text().splitlines()}
    assert {canonical(line) for line in wanted} <= pinned
    assert {"torch", "fastapi", "math-verify"} <= {canonical(line) for line in wanted}


def canonical(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    return match[0].lower().replace("_", "-") if match else ""


@pytest.mark.parametrize("image", re.findall(r"^FROM (\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
def test_images_start_from_few(image: str) -> None:
    stages = set(re.findall(r" AS (\S+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    assert image in stages | {"python:3.11-slim", "debian:bookworm-slim"}
