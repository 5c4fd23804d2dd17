"""Checks docker-compose.yml as far as possible without an engine; tests/e2e/test_compose.py runs it.

compose-spec.json is the schema of the Compose specification, from github.com/compose-spec/compose-go 2.4.8, Apache-2.0.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dvp_rl.contract.engine import EngineName
from dvp_rl.harness.settings import HarnessSettings
from dvp_rl.http.api_tokens import ApiTokens, Scope
from dvp_rl.monitor.settings import MonitorSettings
from dvp_rl.rollout.settings import RolloutSettings
from dvp_trainer.config import TrainSettings
from tests.kit.images import DOCKER, documented_variables, packages, pinned
from tests.kit.wait import WITHIN_S

REPOSITORY = Path(__file__).parents[2]
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?::([-?])([^}]*))?\}")
ASSIGNMENT = re.compile(r"^#?([A-Z_]+)=(.*)$", re.MULTILINE)

TEXT = (REPOSITORY / "docker-compose.yml").read_text()
EXAMPLE = (REPOSITORY / ".env.example").read_text()
USERS = ("rollout", "trainer", "monitor", "operator")
"""Users of Redis, besides `default`, who may do everything."""
SECRETS = ("REDIS_PASSWORD", *(f"{user.upper()}_REDIS_PASSWORD" for user in USERS), "GRAFANA_PASSWORD")
DEFAULTS = {name: value for name, value in ASSIGNMENT.findall(EXAMPLE) if f"\n{name}=" in EXAMPLE} | dict.fromkeys(
    SECRETS, "drawn"
)


def resolve(variables: dict[str, str]) -> dict[str, Any]:
    """The file with its variables substituted as compose does. Raises KeyError if a required one is missing."""

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


def in_profile(profile: str) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in SERVICES.items() if service.get("profiles") == [profile]}


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


def test_file_follows_the_compose_specification() -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"  # the schema's own value has a typo
    jsonschema.Draft7Validator(schema).validate(FILE)
    with pytest.raises(jsonschema.ValidationError, match="restrat"):
        jsonschema.Draft7Validator(schema).validate({"services": {"redis": {"restrat": "always"}}})


@pytest.mark.parametrize("profile", ["", "harness", "observability", "gpu", "*"])
def test_compose_itself_reads_it(profile: str) -> None:
    """Needs the docker command, but no engine."""
    command = ["docker", "compose", "--env-file=.env.example", f"--profile={profile}", "config", "--services"]
    if shutil.which("docker") is None or subprocess.run([*command[:2], "version"], capture_output=True).returncode:
        pytest.skip("NOT TESTED: no docker compose here")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")}
    environment |= dict.fromkeys(SECRETS, "drawn")
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    wanted = {name for name, one in SERVICES.items() if profile == "*" or one.get("profiles", [profile]) == [profile]}
    assert set(done.stdout.split()) == wanted


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
    """Exceptions: a trainer that is done stays so, and `queue` is a command."""
    own = {"trainer": "on-failure", "trainer-gpu": "on-failure", "queue": "no"}
    assert SERVICES[name]["restart"] == own.get(name, "unless-stopped")


def test_what_is_published_is_published_on_loopback_only() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "gateway": ["127.0.0.1:8000:8000"],
        "monitor": ["127.0.0.1:8080:8080"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


def test_broker_is_reached_by_those_who_need_it() -> None:
    (network,) = SERVICES["redis"]["networks"]
    reaching = {name for name, service in SERVICES.items() if network in service["networks"]}
    assert reaching == {"redis", "rollout", "rollout-gpu", "trainer", "trainer-gpu", "monitor", "queue"}


def test_nobody_but_the_broker_knows_more_than_the_password_of_its_own_user() -> None:
    services = resolve(DEFAULTS | {secret: f"<{secret}>" for secret in SECRETS})["services"]
    users = {"rollout-gpu": "rollout", "trainer-gpu": "trainer", "queue": "operator"}
    for name, service in services.items():
        known = {secret for secret in SECRETS if f"<{secret}>" in json.dumps(service)}
        if name == "redis":
            assert known == {*SECRETS} - {"GRAFANA_PASSWORD"}
        elif name == "grafana":
            assert known == {"GRAFANA_PASSWORD"}
        elif "queue" in service["networks"]:
            user = users.get(name, name)
            assert known == {f"{user.upper()}_REDIS_PASSWORD"}, name
            assert f"redis://{user}:<{user.upper()}_REDIS_PASSWORD>@redis:6379/0" in service["environment"].values()
        else:
            assert not known, name


def test_start_waits_for_the_health_of_the_broker_only() -> None:
    """Services wait for each other by themselves, and `up` would fail at once on one that an outage made unhealthy."""
    waits = [pair for one in SERVICES.values() for pair in one.get("depends_on", {}).items()]
    assert len(waits) >= 9
    for other, wait in waits:
        assert wait["condition"] == ("service_healthy" if other == "redis" else "service_started")


def test_stop_leaves_time_to_drain() -> None:
    for name in ("rollout", "rollout-gpu"):
        service = SERVICES[name]
        assert seconds(service["stop_grace_period"]) > service["environment"]["DVP_ROLLOUT__DRAIN_S"] + 5
    hard_stop = re.search(r"hard-stop-after (\d+)s", (DOCKER / "haproxy.cfg").read_text())
    assert hard_stop is not None
    assert seconds(SERVICES["gateway"]["stop_grace_period"]) > int(hard_stop[1])


@pytest.mark.parametrize("secret", SECRETS)
def test_without_a_secret_nothing_starts(secret: str) -> None:
    with pytest.raises(KeyError, match=secret):
        resolve(DEFAULTS | {secret: ""})


def test_example_lists_every_variable() -> None:
    used = {name for name, _, _ in VARIABLE.findall(TEXT)}
    listed = {name for name, _ in ASSIGNMENT.findall(EXAMPLE)} - {"COMPOSE_PROFILES"}
    assert listed == used


def test_example_states_the_defaults() -> None:
    """Settings that are commented out there show the defaults."""
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
    assert settings.redis_url == "redis://rollout:drawn@redis:6379/0"
    assert settings.device == ("cuda" if name == "rollout-gpu" else "cpu")
    assert settings.engine is (EngineName.SGLANG if name == "rollout-gpu" else EngineName.TRANSFORMERS)


def test_the_monitor_understands_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment("monitor", monkeypatch)
    settings = MonitorSettings.load([])
    assert settings.run_id == SERVICES["rollout"]["environment"]["DVP_ROLLOUT__RUN_ID"]
    assert settings.files("demo") == (Path("/runs/demo/metrics.jsonl"), None)


@pytest.mark.parametrize("name", ["trainer", "trainer-gpu"])
def test_trainers_understand_their_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(name, monkeypatch)
    settings = TrainSettings.load([], REPOSITORY / SERVICES[name]["command"][0])
    assert settings.run_id == SERVICES["rollout"]["environment"]["DVP_ROLLOUT__RUN_ID"]
    assert settings.out_dir == Path("/runs/demo")
    assert settings.weights_folder == Path("/weights")
    assert settings.model.device == ("cuda" if name == "trainer-gpu" else "cpu")


def test_the_harness_understands_its_environment(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are those that deploy/docker/README.md shows."""
    lines = documented_variables()
    service = resolve(DEFAULTS | lines)["services"]["harness"]
    set_environment("harness", monkeypatch, {"harness": service})
    settings = HarnessSettings.load(shlex.split(service["command"]))
    assert (settings.workers, settings.max_turns) == (32, 8)
    module, _, name = settings.environment.partition(":")
    assert f"class {name}" in (REPOSITORY / module.replace(".", "/")).with_suffix(".py").read_text()
    (mount,) = mounts_of_tokens("harness")
    assert f"./{lines['DVP_FOLDER']}" in [volume["source"] for volume in service["volumes"]]
    assert settings.token_file is not None
    assert (drawn / mount["source"] / settings.token_file.relative_to(mount["target"])).is_file()
    assert service["networks"] == ["api"], "it needs neither the broker nor weights"


SERVED = {
    "rollout": {Scope.OPERATE, Scope.HARNESS, Scope.ROLLOUT, Scope.READ},
    "rollout-gpu": {Scope.OPERATE, Scope.HARNESS, Scope.ROLLOUT, Scope.READ},
    "monitor": {Scope.OPERATE, Scope.HARNESS, Scope.ROLLOUT, Scope.READ},
    "trainer": {Scope.READ},
    "trainer-gpu": {Scope.READ},
}
"""Scopes whose tokens a container sees."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the secrets that `make secrets` makes."""
    folder = tmp_path_factory.mktemp("drawn")
    shutil.copy(REPOSITORY / ".env.example", folder)
    draw(folder)
    return folder


def draw(folder: Path) -> str:
    command = [REPOSITORY / "deploy" / "secrets.sh", folder]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=WITHIN_S).stdout


def test_secrets_are_drawn_once_and_long(drawn: Path) -> None:
    passwords = dict(ASSIGNMENT.findall((drawn / ".env").read_text()))
    secrets = [passwords[name] for name in SECRETS]
    secrets += [file.read_text() for file in (drawn / ".secrets").rglob("*") if file.is_file()]
    assert len(set(secrets)) == len(SECRETS) + len(Scope)
    assert all(re.fullmatch("[0-9a-f]{48}", secret) for secret in secrets)
    assert passwords | dict.fromkeys(SECRETS, "drawn") == dict(ASSIGNMENT.findall(EXAMPLE)) | dict.fromkeys(
        SECRETS, "drawn"
    )
    before = {file: file.read_bytes() for file in drawn.rglob("*") if file.is_file()}
    assert draw(drawn) == ""
    assert {file: file.read_bytes() for file in drawn.rglob("*") if file.is_file()} == before


def test_what_is_missing_is_drawn_and_the_rest_stays(tmp_path: Path) -> None:
    """Covers an interrupted run, an .env that was copied, and folders that others may read."""
    folder = tmp_path / "a folder"
    (folder / ".secrets" / "tokens" / "operate").mkdir(parents=True)
    (folder / ".secrets" / "tokens" / "operate" / "operator").touch()
    (folder / ".env.example").write_text(EXAMPLE)
    (folder / ".env").write_text("GRAFANA_PASSWORD=mine\nREDIS_PASSWORD=")
    (folder / ".secrets").chmod(0o755)
    (tmp_path / "elsewhere" / "a folder").mkdir(parents=True)
    command = [REPOSITORY / "deploy" / "secrets.sh", "a folder"]
    environment = os.environ | {"CDPATH": str(tmp_path / "elsewhere")}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=WITHIN_S, capture_output=True)
    assert len((folder / ".secrets" / "tokens" / "operate" / "operator").read_text()) == 48
    lines = dict(ASSIGNMENT.findall((folder / ".env").read_text()))
    assert lines.keys() == {*SECRETS}, "an older .env gets what is new in the example, and nothing else of it"
    assert lines.pop("GRAFANA_PASSWORD") == "mine"
    assert all(re.fullmatch("[0-9a-f]{48}", password) for password in lines.values())
    assert (folder / ".secrets").stat().st_mode & 0o077 == 0
    assert not any((tmp_path / "elsewhere" / "a folder").iterdir())


def test_passwords_that_are_there_stay_however_they_are_written(tmp_path: Path) -> None:
    (tmp_path / ".env.example").write_text(EXAMPLE)
    own = "export REDIS_PASSWORD=a\n ROLLOUT_REDIS_PASSWORD=b\nTRAINER_REDIS_PASSWORD = c\n#GRAFANA_PASSWORD=\n"
    (tmp_path / ".env").write_text(own)
    draw(tmp_path)
    drawn = (tmp_path / ".env").read_text().removeprefix(own)
    names = re.findall("^([A-Z_]+)=[0-9a-f]{48}$", drawn, re.MULTILINE)
    assert (len(drawn.splitlines()), {*names}) == (3, {*SECRETS[3:]})


def test_lines_of_another_system_are_refused(tmp_path: Path) -> None:
    (tmp_path / ".env.example").write_text(EXAMPLE)
    (tmp_path / ".env").write_text("GRAFANA_PASSWORD=\r\n")
    command = [REPOSITORY / "deploy" / "secrets.sh", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 1
    assert "carriage return" in done.stderr
    assert (tmp_path / ".env").read_bytes() == b"GRAFANA_PASSWORD=\r\n"


def test_nothing_is_drawn_where_nothing_is_deployed(tmp_path: Path) -> None:
    command = [REPOSITORY / "deploy" / "secrets.sh", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stderr) == (1, f"{tmp_path}: no .env.example here\n")
    assert not any(tmp_path.iterdir())


def test_secrets_are_for_their_owner_and_for_containers(drawn: Path) -> None:
    """A container's user can read what is mounted; on the host only the owner can enter .secrets."""
    assert (drawn / ".env").stat().st_mode & 0o077 == 0
    assert (drawn / ".secrets").stat().st_mode & 0o077 == 0
    for path in (drawn / ".secrets" / "tokens").rglob("*"):
        assert path.stat().st_mode & 0o004, path


@pytest.mark.parametrize("name", SERVED)
def test_containers_know_their_callers(name: str, drawn: Path, tmp_path: Path) -> None:
    for mount in mounts_of_tokens(name):
        shutil.copytree(drawn / mount["source"], tmp_path / mount["target"].lstrip("/"))
    (folder,) = (value for key, value in SERVICES[name]["environment"].items() if key.endswith("__TOKEN_FOLDER"))
    tokens = ApiTokens(folder=tmp_path / folder.lstrip("/"))
    files = [file for file in (drawn / ".secrets" / "tokens").rglob("*") if file.is_file()]
    found = {caller for file in files if (caller := tokens.find(file.read_bytes()))}
    assert {caller.scope for caller in found} == SERVED[name]
    assert all((drawn / ".secrets" / "tokens" / caller.scope / caller.name).exists() for caller in found)


def mounts_of_tokens(name: str) -> list[dict[str, Any]]:
    mounts = [volume for volume in SERVICES[name]["volumes"] if volume["source"].startswith("./.secrets/tokens")]
    assert all(mount["read_only"] and mount["bind"] == {"create_host_path": False} for mount in mounts)
    return mounts


def set_environment(name: str, monkeypatch: pytest.MonkeyPatch, services: dict[str, dict[str, Any]] = SERVICES) -> None:
    for key, value in services[name]["environment"].items():
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
    gpu = in_profile("gpu")
    assert gpu.keys() == {"rollout-gpu", "trainer-gpu"}
    for service in gpu.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    for network in ("api", "metrics"):
        assert gpu["rollout-gpu"]["networks"][network]["aliases"] == ["rollout"]
    assert gpu["trainer-gpu"]["networks"]["metrics"]["aliases"] == ["trainer"]
    without = resolve(DEFAULTS | {"CPU_REPLICAS": "0", "CPU_TRAINERS": "0"})["services"]
    assert [without[name]["deploy"]["replicas"] for name in ("rollout", "trainer")] == [0, 0]


@pytest.mark.parametrize("server", [name.value for name in (EngineName.SGLANG, EngineName.VLLM)])
def test_replicas_on_gpus_have_the_server_that_is_asked_for(server: str) -> None:
    service = resolve(DEFAULTS | {"GPU_ENGINE": server})["services"]["rollout-gpu"]
    assert service["image"] == f"dvp-rl/rollout-{server}"
    assert service["build"]["args"] == {"SERVER": server}
    assert service["environment"]["DVP_ROLLOUT__ENGINE"] == server


def test_replicas_on_gpus_have_what_sglang_asks_for() -> None:
    service = SERVICES["rollout-gpu"]
    assert (REPOSITORY / service["build"]["dockerfile"]).name == "server.Dockerfile"
    assert service["shm_size"] == "32g"
    assert service["ulimits"] == {"memlock": -1, "stack": 67108864}
    assert service["tmpfs"] == ["/tmp:exec"], "kernels are compiled there"


def test_the_trainer_on_gpus_can_compile_the_kernels() -> None:
    service = SERVICES["trainer-gpu"]
    assert service["build"]["target"] == "trainer-gpu", "it has a C compiler"
    assert service["tmpfs"] == ["/tmp:exec"], "kernels are compiled there"


def test_prometheus_finds_what_it_is_told_to_scrape() -> None:
    """Covers names, ports, and the file that holds the token."""
    (tokens,) = mounts_of_tokens("prometheus")
    told = yaml.safe_load((REPOSITORY / "deploy" / "prometheus" / "prometheus.yml").read_text())
    names = {name for name, service in SERVICES.items() if "metrics" in service["networks"]}
    for job in told["scrape_configs"]:
        assert Path(job["authorization"]["credentials_file"]).parent == Path(tokens["target"])
        targets = {target for static in job.get("static_configs", []) for target in static["targets"]}
        targets |= {f"{name}:{dns['port']}" for dns in job.get("dns_sd_configs", []) for name in dns["names"]}
        assert {target.partition(":")[0] for target in targets} <= names
        ports = {"monitor": 8080, "rollout": 8000, "trainer": 9100}
        assert all(int(target.partition(":")[2]) == ports[target.partition(":")[0]] for target in targets)
    assert [job["job_name"] for job in told["scrape_configs"]] == ["monitor", "rollout", "trainer"]


def test_observability_brings_pinned_images_and_what_they_are_provisioned_with() -> None:
    services = in_profile("observability")
    assert services.keys() == {"prometheus", "grafana"}
    for service in services.values():
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"])
        assert service["networks"] == ["metrics"]
        mounts = [volume for volume in service["volumes"] if volume["type"] == "bind"]
        provided = [mount for mount in mounts if not mount["source"].startswith("./.secrets")]
        assert all(mount["read_only"] and (REPOSITORY / mount["source"]).is_dir() for mount in provided)
    (provider,) = yaml.safe_load((REPOSITORY / "deploy/grafana/provisioning/dashboards/dvp.yml").read_text())[
        "providers"
    ]
    mounted = {volume["target"] for volume in services["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounted


def test_images_install_what_they_need_and_only_what_is_pinned() -> None:
    found = packages(DOCKER / "Dockerfile")
    for names in found.values():
        assert {"fastapi", "redis"} <= names <= pinned()
    heavy = {"torch", "transformers", "math-verify"}
    assert {image: names & heavy for image, names in found.items()} == {
        "monitor": set(),
        "rollout": {"torch", "transformers"},
        "trainer": heavy,
    }


@pytest.mark.parametrize("image", re.findall(r"^FROM (\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
def test_images_start_from_few(image: str) -> None:
    stages = set(re.findall(r" AS (\S+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    assert image in stages | {"python:3.11-slim", "debian:bookworm-slim"}
