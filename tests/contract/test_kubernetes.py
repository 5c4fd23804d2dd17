"""deploy/kubernetes as far as that can be told without a cluster: rendered, and held against the API's schemas.

Kubernetes' own schemas come from PyPI's kubernetes-validate, in their strict form: an unknown field is an error.
The two of KEDA are written after config/crd/bases and the documentation of the redis-streams scaler,
github.com/kedacore/keda and keda-docs (Apache-2.0), and as strict.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from services.contract.keys import Keys
from services.http.settings import WeightReader
from services.http.tokens import Scope, Tokens
from services.monitor.settings import MonitorSettings
from services.rollout.settings import EngineName, RolloutSettings
from services.transport.roles import Role
from services.weights.settings import WeightServerSettings
from tests.kit.manifests import FOLDER, REPOSITORY, Manifest, Rendered, copy_of, renderer
from tests.kit.wait import WITHIN_S
from trainer.config import SamplingSection, TrainSettings

NO_MANIFESTS = {"kustomization.yaml", "names.yaml"}
BASE = sorted(path for path in (FOLDER / "base").glob("*.yaml") if path.name not in NO_MANIFESTS)
VERSIONS = ("1.30", "1.37")
"""Oldest and newest that the manifests are meant for."""
KEDA = {
    kind: json.loads((Path(__file__).parent / f"keda-{kind.lower()}.json").read_text())
    for kind in ("ScaledObject", "TriggerAuthentication")
}
OVERLAYS = pytest.mark.parametrize("rendered", ["cpu", "gpu"], indirect=True)


@pytest.fixture(scope="module")
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return Rendered(request.param, tmp_path_factory.mktemp("kubernetes"))


def check(manifest: Manifest, version: str) -> None:
    if manifest["apiVersion"].startswith("keda.sh/"):
        jsonschema.Draft7Validator(KEDA[manifest["kind"]]).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def all_containers(rendered: Rendered) -> Iterator[Manifest]:
    for spec in rendered.pods().values():
        yield from spec["containers"] + spec.get("initContainers", [])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", BASE, ids=lambda path: path.stem)
def test_base_follows_the_schemas(path: Path, version: str) -> None:
    for manifest in yaml.safe_load_all(path.read_text()):
        check(manifest, version)


@OVERLAYS
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_applied_follows_the_schemas(rendered: Rendered, version: str) -> None:
    assert len(rendered.manifests) > 15
    for manifest in rendered.manifests:
        check(manifest, version)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("rollout", "readinessProbe", "readynessProbe"),
        ("redis", "periodSeconds: 2", "periodSeconds: soon"),
        ("scaling", "streamLength", "streamlength"),
        ("scaling", "key: SCALER_REDIS_USER", "keys: SCALER_REDIS_USER"),
        ("trainer", "action: Ignore", "acton: Ignore"),
    ],
)
def test_schemas_refuse_what_is_mistyped(name: str, old: str, new: str) -> None:
    text = (FOLDER / "base" / f"{name}.yaml").read_text()
    assert old in text
    manifests = [*yaml.safe_load_all(text.replace(old, new))]
    with pytest.raises(jsonschema.ValidationError):
        list(map(check, manifests, VERSIONS[-1:] * len(manifests)))


@OVERLAYS
def test_pods_are_restricted_and_bounded(rendered: Rendered) -> None:
    """What the namespace's label `restricted` enforces, and a read-only root."""
    assert (
        rendered.one("Namespace", "dvp-rl")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    )
    for spec in rendered.pods().values():
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in all_containers(rendered):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()


@OVERLAYS
def test_all_that_stays_up_is_probed(rendered: Rendered) -> None:
    stays = [one for one in all_containers(rendered) if one["name"] != "inputs"]
    assert {one["name"] for one in stays} == {"redis", "rollout", "trainer", "weights", "monitor"}
    for container in stays:
        assert {"startupProbe", "livenessProbe"} <= container.keys()
        ports = {port["name"] for port in container["ports"]}
        probes = [container[key] for key in container if key.endswith("Probe")]
        assert all("exec" in probe or probe["httpGet"]["port"] in ports for probe in probes)


@OVERLAYS
def test_services_and_budgets_find_their_pods(rendered: Rendered) -> None:
    labels = {
        workload["metadata"]["name"]: workload["spec"]["template"]["metadata"]["labels"]
        for workload in rendered.all("Deployment", "StatefulSet", "Job")
    }
    for service in rendered.all("Service"):
        name = service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= labels[name].items()
        spec = rendered.pods()[name]
        open_ports = {
            port["name"]: port["containerPort"]
            for one in spec["containers"] + spec.get("initContainers", [])
            for port in one.get("ports", [])
        }
        assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == open_ports
    for budget in rendered.all("PodDisruptionBudget"):
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels[budget["metadata"]["name"]].items()


@OVERLAYS
def test_replicas_understand_their_environment(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RolloutSettings.load(given(rendered, "rollout", "rollout", monkeypatch))
    assert settings.redis_url == broker_url(rendered, "rollout")
    assert settings.run_id == run(rendered)["RUN_ID"]
    assert str(settings.model) == run(rendered)["MODEL"]
    assert settings.engine is (EngineName.SGLANG if rendered.overlay == "gpu" else EngineName.TRANSFORMERS)
    assert settings.device == ("cuda" if rendered.overlay == "gpu" else "cpu")
    (pause,) = rendered.container("rollout", "rollout")["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert rendered.pods()["rollout"]["terminationGracePeriodSeconds"] > int(pause) + settings.drain_s + 10


@OVERLAYS
def test_the_trainer_announces_copies_of_the_weights_that_it_serves(
    rendered: Rendered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text((REPOSITORY / "deploy" / "demo" / "config.toml").read_text())
    trainer = TrainSettings.load(given(rendered, "trainer", "trainer", monkeypatch), tmp_path / "config.toml")
    served = WeightServerSettings.load(given(rendered, "trainer", "weights", monkeypatch))
    copied = WeightServerSettings.load(given(rendered, "weights", "weights", monkeypatch))
    assert trainer.run_id == run(rendered)["RUN_ID"]
    assert trainer.broker.url.get_secret_value() == broker_url(rendered, "trainer")
    assert trainer.weights_folder == served.folder
    assert copied.upstream.url == f"http://trainer:{served.port}"
    assert trainer.weights.url == f"http://weights:{copied.port}"
    assert trainer.metrics.port == 9100
    assert trainer.model.device == ("cuda" if rendered.overlay == "gpu" else "cpu")
    assert rendered.container("trainer", "weights")["restartPolicy"] == "Always", (
        "a sidecar: the job ends with the trainer"
    )


@OVERLAYS
def test_copies_of_the_weights_outlive_their_pod_and_the_trainer(rendered: Rendered) -> None:
    """Two pods on one ReadWriteOnce volume need one node, which nobody can promise."""
    claims = {
        pod: [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in spec["volumes"]
            if "persistentVolumeClaim" in volume
        ]
        for pod, spec in rendered.pods().items()
    }
    assert {pod: names for pod, names in claims.items() if names} == {"trainer": ["runs"], "weights": ["weights"]}
    mounts = {one["name"]: one["mountPath"] for one in rendered.container("weights", "weights")["volumeMounts"]}
    assert rendered.environment("weights", "weights")["DVP_WEIGHTS__FOLDER"] == mounts["copies"]
    assert rendered.one("Deployment", "weights")["spec"]["strategy"] == {"type": "Recreate"}


@OVERLAYS
def test_no_replica_is_killed_for_what_it_waits_for(rendered: Rendered) -> None:
    """It is not ready without weights, broker or engine, and a restart would bring none of them."""
    replica = rendered.container("rollout", "rollout")
    asked = {key: replica[key]["httpGet"]["path"] for key in replica if key.endswith("Probe")}
    assert asked == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}


@OVERLAYS
def test_the_monitor_understands_its_environment(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = MonitorSettings.load(given(rendered, "monitor", "monitor", monkeypatch))
    assert (settings.port, settings.run_id) == (8080, run(rendered)["RUN_ID"])
    assert settings.redis_url == broker_url(rendered, "monitor")


@OVERLAYS
def test_nobody_but_the_broker_knows_more_than_the_password_of_its_own_user(rendered: Rendered) -> None:
    passwords = {name: value for name, value in rendered.secret("redis-").items() if name.endswith("_PASSWORD")}
    assert len({*passwords.values()}) == len(passwords) == 1 + len(Role)
    for pod, spec in rendered.pods().items():
        for one in spec["containers"] + spec.get("initContainers", []):
            seen = "".join(rendered.environment(pod, one["name"]).values())
            known = {name for name, password in passwords.items() if password in seen}
            own = {f"{pod.upper()}_REDIS_PASSWORD"} & passwords.keys() if one["name"] == pod else set()
            assert known == (set(passwords) if pod == "redis" else own), (pod, one["name"])


SERVED = {
    ("rollout", "rollout"): {Scope.OPERATE, Scope.ROLLOUT, Scope.READ},
    ("monitor", "monitor"): {Scope.OPERATE, Scope.ROLLOUT, Scope.READ},
    ("weights", "weights"): {Scope.WEIGHTS, Scope.READ},
    ("trainer", "weights"): {Scope.WEIGHTS, Scope.READ},
    ("trainer", "trainer"): {Scope.READ},
}
"""Whose tokens a container sees: those of its callers."""


@OVERLAYS
@pytest.mark.parametrize(("pod", "name"), SERVED)
def test_containers_know_their_callers_and_no_others(pod: str, name: str, rendered: Rendered, tmp_path: Path) -> None:
    rendered.mount(pod, name, tmp_path)
    variables = rendered.environment(pod, name)
    (folder,) = (value for key, value in variables.items() if key.endswith("__TOKEN_FOLDER"))
    tokens = Tokens(folder=tmp_path / folder.lstrip("/"))
    callers = {scope: tokens.find(rendered.token(scope).encode()) for scope in Scope}
    assert {scope for scope, caller in callers.items() if caller} == SERVED[pod, name]
    assert all(caller is None or caller.scope is scope for scope, caller in callers.items())


@OVERLAYS
@pytest.mark.parametrize(
    ("pod", "name", "variable"),
    [
        ("rollout", "rollout", "DVP_ROLLOUT__WEIGHTS__TOKEN_FILE"),
        ("trainer", "trainer", "DVP_TRAIN__WEIGHTS__TOKEN_FILE"),
        ("weights", "weights", "DVP_WEIGHTS__UPSTREAM__TOKEN_FILE"),
    ],
)
def test_those_who_read_weights_show_the_token_for_it(
    pod: str, name: str, variable: str, rendered: Rendered, tmp_path: Path
) -> None:
    rendered.mount(pod, name, tmp_path)
    file = tmp_path / rendered.environment(pod, name)[variable].lstrip("/")
    assert WeightReader(token_file=file).read_token() == rendered.token(Scope.WEIGHTS)


@OVERLAYS
def test_a_new_token_starts_nothing_again(rendered: Rendered, tmp_path: Path) -> None:
    """A job's template cannot be changed, and whose template changes is started again."""
    again = Rendered(rendered.overlay, tmp_path)
    assert again.token(Scope.ROLLOUT) != rendered.token(Scope.ROLLOUT)
    password = re.compile(r"redis-[a-z0-9]{10}")
    pods = [password.sub("redis", json.dumps(one.pods(), sort_keys=True)) for one in (again, rendered)]
    assert pods[0] == pods[1]


def broker_url(rendered: Rendered, user: str) -> str:
    return f"redis://{user}:{rendered.secret('redis-')[f'{user.upper()}_REDIS_PASSWORD']}@redis:6379/0"


def given(rendered: Rendered, pod: str, container: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sets the container's environment; no arguments."""
    for name, value in rendered.environment(pod, container).items():
        if name.startswith("DVP_"):
            monkeypatch.setenv(name, value)
    return []


def run(rendered: Rendered) -> dict[str, str]:
    return dict(rendered.one("ConfigMap", "run-")["data"])


@OVERLAYS
def test_replicas_scale_with_the_jobs_that_exist(rendered: Rendered) -> None:
    spec = rendered.one("ScaledObject", "rollout")["spec"]
    keys, environment = Keys(run(rendered)["RUN_ID"]), rendered.environment("rollout", "rollout")
    at_once = int(environment["DVP_ROLLOUT__MAX_BATCH"]) // SamplingSection().n
    share = RolloutSettings.model_fields["client_share"].default
    assert {trigger["authenticationRef"]["name"] for trigger in spec["triggers"]} == {"redis"}
    triggers = [trigger["metadata"] for trigger in spec["triggers"]]
    assert {trigger["stream"]: int(trigger["streamLength"]) for trigger in triggers} == {
        keys.jobs: at_once,
        keys.client_jobs: share * at_once,
    }
    for trigger in triggers:
        assert "consumerGroup" not in trigger, "KEDA would look at pending entries instead"
    shown = {
        one["parameter"]: rendered.secret(one["name"])[one["key"]]
        for one in rendered.one("TriggerAuthentication", "redis")["spec"]["secretTargetRef"]
    }
    assert shown == {"username": Role.SCALER, "password": rendered.secret("redis-")["SCALER_REDIS_PASSWORD"]}
    assert "replicas" not in rendered.one("Deployment", "rollout")["spec"], "each apply would undo KEDA's choice"


@OVERLAYS
def test_nobody_reaches_the_broker_but_those_who_need_it(rendered: Rendered) -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in rendered.all("NetworkPolicy")}
    assert policies["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    reaching = [
        peer
        for spec in policies.values()
        for rule in spec.get("ingress", [])
        if any(port["port"] == 6379 for port in rule["ports"])
        for peer in rule["from"]
    ]
    pods, namespace = reaching
    assert pods["podSelector"]["matchExpressions"][0]["values"] == ["rollout", "trainer", "monitor"]
    assert namespace["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "keda"}


@OVERLAYS
def test_weights_go_from_the_trainer_to_their_copies_and_from_there_to_replicas(rendered: Rendered) -> None:
    """Both ends of each connection allow it, and no other pod has one."""
    allowed = {"Ingress": set[tuple[str, str]](), "Egress": set[tuple[str, str]]()}
    for policy in rendered.all("NetworkPolicy"):
        spec = policy["spec"]
        for direction, peers in (("Ingress", "from"), ("Egress", "to")):
            for rule in spec.get(direction.lower(), ()):
                if {"port": 8200} in rule["ports"]:
                    others = {app for peer in rule[peers] for app in apps(peer.get("podSelector", {}))}
                    ends = {(own, other) for own in apps(spec["podSelector"]) for other in others}
                    allowed[direction] |= ends if direction == "Egress" else {(other, own) for own, other in ends}
    assert (
        allowed["Ingress"]
        == allowed["Egress"]
        == {("rollout", "weights"), ("trainer", "weights"), ("weights", "trainer")}
    )


def apps(selector: Manifest) -> list[str]:
    """The pods that it selects."""
    (found,) = [one["values"] for one in selector.get("matchExpressions", ())] or [[]]
    return [*found, *selector.get("matchLabels", {}).values()]


@OVERLAYS
def test_gpus_are_asked_for_where_they_are_used(rendered: Rendered) -> None:
    asking = {one["name"] for one in all_containers(rendered) if "nvidia.com/gpu" in one["resources"]["limits"]}
    assert asking == ({"rollout", "trainer"} if rendered.overlay == "gpu" else set())


@OVERLAYS
def test_images_are_ours_or_the_broker(rendered: Rendered) -> None:
    stages = set(re.findall(r" AS (\w+)$", (REPOSITORY / "deploy/docker/Dockerfile").read_text(), re.MULTILINE))
    for container in all_containers(rendered):
        name = container["image"].split(":")[0]
        assert name == "redis" or name.removeprefix("dvp-rl/") in stages | {"inputs", "rollout-sglang"}


def test_no_secret_is_committed(tmp_path: Path) -> None:
    """Without .env and .secrets, which git ignores, there is nothing to render."""
    command = renderer()
    for folder in ("", "deploy/kubernetes/overlays/cpu/"):
        names = [f"{folder}.env", f"{folder}.secrets/tokens/read/prometheus"]
        listed = subprocess.run(["git", "check-ignore", *names], cwd=REPOSITORY, capture_output=True, text=True)
        assert listed.stdout.split() == names
    assert not any("kind: Secret" in path.read_text() for path in BASE)
    overlay = copy_of("cpu", tmp_path)
    done = subprocess.run([*command, str(overlay)], capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode != 0
    assert ".env" in done.stderr
