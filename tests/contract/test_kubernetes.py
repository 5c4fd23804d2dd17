"""Checks deploy/kubernetes as far as possible without a cluster: rendered, and validated against the API's schemas.

Kubernetes' own schemas come from PyPI's kubernetes-validate, in their strict form: an unknown field is an error.
Those of KEDA follow config/crd/bases and the documentation of the redis-streams scaler, github.com/kedacore/keda and
keda-docs; those of the Prometheus operator follow example/prometheus-operator-crd,
github.com/prometheus-operator/prometheus-operator. All are Apache-2.0 and equally strict.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dvp_rl.contract.engine import EngineName
from dvp_rl.contract.keys import Keys
from dvp_rl.harness.settings import HarnessSettings
from dvp_rl.http.api_tokens import ApiTokens, Scope
from dvp_rl.http.settings import WeightReader
from dvp_rl.monitor.settings import MonitorSettings
from dvp_rl.rollout.settings import RolloutSettings
from dvp_rl.transport.roles import Role
from dvp_rl.weights.settings import WeightServerSettings
from dvp_trainer.config import SamplingSection, TrainSettings
from tests.kit.helm import CHART, NAMESPACE, HelmError, render
from tests.kit.manifests import REPOSITORY, VARIANTS, Manifest, Rendered, secrets
from tests.kit.wait import WITHIN_S

VERSIONS = ("1.30", "1.37")
"""Oldest and newest versions of Kubernetes that the chart is meant for."""
CUSTOM = {
    kind: json.loads((Path(__file__).parent / f"{group}-{kind.lower()}.json").read_text())
    for group, kind in (
        ("keda", "ScaledObject"),
        ("keda", "TriggerAuthentication"),
        ("prometheus", "PodMonitor"),
        ("prometheus", "PrometheusRule"),
    )
}
EVERY_VARIANT = pytest.mark.parametrize("rendered", VARIANTS, indirect=True)


@pytest.fixture(scope="module")
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(request.param)


@pytest.fixture(scope="module")
def everything() -> Rendered:
    return Rendered("all")


def check(manifest: Manifest, version: str) -> None:
    if (schema := CUSTOM.get(manifest["kind"])) is not None:
        jsonschema.Draft7Validator(schema).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def all_containers(rendered: Rendered) -> Iterator[Manifest]:
    for spec in rendered.pods().values():
        yield from spec["containers"] + spec.get("initContainers", [])


@EVERY_VARIANT
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_installed_follows_the_schemas(rendered: Rendered, version: str) -> None:
    assert len(rendered.manifests) > 25
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
        ("prometheus", "jobLabel", "joblabel"),
        ("prometheus", "expr:", "exp:"),
    ],
)
def test_schemas_refuse_what_is_mistyped(everything: Rendered, name: str, old: str, new: str) -> None:
    text = everything.texts[f"dvp-rl/templates/{name}.yaml"]
    assert old in text
    manifests = [one for one in yaml.safe_load_all(text.replace(old, new)) if one]
    with pytest.raises(jsonschema.ValidationError):
        list(map(check, manifests, VERSIONS[-1:] * len(manifests)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rolout": {}}, "'rolout' not allowed"),
        ({"rollout": {"replicas": "two"}}, "at '/rollout/replicas': got string, want integer"),
        ({"run": {"id": "my run"}}, "at '/run/id'"),
        ({"dns": {"namespaces": []}}, "at '/dns/namespaces'"),
        ({"rollout": {"cache": "5 GB"}}, "at '/rollout/cache'"),
        ({"rollout": {"resources": {"limits": {"ephemeral-storage": None}}}}, "'ephemeral-storage'"),
        *(({"rollout": {"settings": {name: None}}}, f"'{name}'") for name in ("max_batch", "client_share", "drain_s")),
        ({"rollout": {"strategy": {"type": "Recreate"}}}, "'type' not allowed"),
        ({"harness": {"environment": "tasks/math.py"}}, "at '/harness/environment'"),
        ({"scaling": {"minReplicas": 0}}, "at '/scaling/minReplicas'"),
        ({"scaling": {"enabled": True, "minReplicas": 9}}, "scaling.minReplicas is larger than scaling.maxReplicas"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(values: Manifest, message: str) -> None:
    with pytest.raises(HelmError, match=re.escape(message)):
        render(values)


@pytest.mark.parametrize("pod", ["rollout", "trainer", "harness"])
def test_what_the_chart_sets_cannot_be_set_again(pod: str) -> None:
    """Duplicate variables are refused: which one counts would depend on who applies them."""
    prefix = {"rollout": "DVP_ROLLOUT__", "trainer": "DVP_TRAIN__", "harness": "DVP_HARNESS__"}[pod]
    settings = yaml.safe_load((CHART / "values.yaml").read_text())[pod]["settings"]
    free = {prefix + name.upper() for name in settings}
    played: Manifest = {"harness": {"environment": "a:B"}}
    taken = {name for name in Rendered("cpu", played).environment(pod, pod) if name.startswith(prefix)} - free
    assert len(taken) > 3
    for name in taken:
        value: Manifest | str = "own"
        for part in reversed(name.removeprefix(prefix).lower().split("__")):
            value = {part: value}
        with pytest.raises(HelmError, match=f"{name} is set by the chart or set twice: .* {pod}.settings or {pod}.env"):
            render({pod: {**played.get(pod, {}), "settings": value}})


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"settings": {"RUN_ID": "x"}}, "DVP_ROLLOUT__RUN_ID"),
        ({"settings": {"weights__cache": "/x"}}, "DVP_ROLLOUT__WEIGHTS__CACHE"),
        ({"settings": {"threads": 2}, "env": [{"name": "DVP_ROLLOUT__THREADS", "value": "3"}]}, "DVP_ROLLOUT__THREADS"),
        ({"env": [{"name": "PYTHONPATH", "value": "/x"}]}, "PYTHONPATH"),
    ],
)
def test_no_variable_is_set_twice(values: Manifest, name: str) -> None:
    with pytest.raises(HelmError, match=f"{name} is set by the chart or set twice"):
        render({"rollout": values})


def test_settings_become_the_variables_of_their_service(everything: Rendered) -> None:
    replica, trainer = everything.environment("rollout", "rollout"), everything.environment("trainer", "trainer")
    assert replica["DVP_ROLLOUT__CLIENT_SHARE"] == "0.5"
    assert replica["DVP_ROLLOUT__SGLANG__TP"] == "2"
    assert replica["NCCL_DEBUG"] == "WARN", "from env"
    assert trainer["DVP_TRAIN__STEPS"] == "3000000", "Helm reads numbers as floats"
    unset = Rendered("cpu", {"rollout": {"settings": {"threads": None, "max_context": None}}})
    assert not {"DVP_ROLLOUT__THREADS", "DVP_ROLLOUT__MAX_CONTEXT"} & unset.environment("rollout", "rollout").keys()


def test_texts_stay_texts() -> None:
    """The API refuses numbers in place of texts."""
    values: Manifest = {
        "inputs": {"claim": "123"},
        "redis": {"maxmemory": "2147483648"},
        "trainer": {"volume": {"storageClass": "1"}},
        "dns": {"addresses": ["::/0"]},
        "run": {"id": "7", "model": "8", "config": "9"},
        "restart": 3,
    }
    rendered = Rendered("cpu", values)
    for manifest in rendered.manifests:
        check(manifest, VERSIONS[-1])
    assert rendered.environment("rollout", "rollout")["DVP_ROLLOUT__RUN_ID"] == "7"


def test_the_example_of_the_readme_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    example = (CHART.parent / "README.md").read_text().split("## Your own run\n\n")[1].split("\n\n")[0]
    rendered = Rendered("cpu", yaml.safe_load(textwrap.dedent(example)))
    replica = RolloutSettings.load(given(rendered, "rollout", "rollout", monkeypatch))
    demo = REPOSITORY / "deploy" / "demo" / "config.toml"
    trainer = TrainSettings.load(given(rendered, "trainer", "trainer", monkeypatch), demo)
    assert (trainer.run_id, trainer.steps, trainer.optimizer.lr) == (replica.run_id, 2000, 2e-6)
    assert (str(replica.model), replica.max_batch) == ("models/Qwen3-0.6B", 128)


@EVERY_VARIANT
def test_pods_are_restricted_and_bounded(rendered: Rendered) -> None:
    """Pods have what the namespace's label `restricted` enforces, and a read-only root."""
    (namespace,) = rendered.all("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
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
        assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
        assert "ephemeral-storage" in container["resources"]["requests"]


@EVERY_VARIANT
def test_a_nodes_disk_is_bounded_and_a_pod_may_fill_its_volumes(rendered: Rendered) -> None:
    """A pod that exceeds the sum of its containers' limits is evicted, whatever its volumes allow."""
    for pod, spec in rendered.pods().items():
        limits = [one["resources"]["limits"]["ephemeral-storage"] for one in spec["containers"]]
        empty = [volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume]
        on_disk = [one["sizeLimit"] for one in empty if one.get("medium") != "Memory"]
        assert all("sizeLimit" in one for one in empty)
        assert sum(map(mebibytes, on_disk)) < sum(map(mebibytes, limits)), pod
        in_memory = sum(mebibytes(one["sizeLimit"]) for one in empty if one.get("medium") == "Memory")
        assert in_memory < sum(mebibytes(one["resources"]["limits"]["memory"]) for one in spec["containers"])


def mebibytes(quantity: str) -> int:
    number, unit = quantity[:-2], quantity[-2:]
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]


@EVERY_VARIANT
def test_all_that_stays_up_is_probed(rendered: Rendered) -> None:
    """A harness serves nothing."""
    stays = [one for one in all_containers(rendered) if one["name"] not in ("inputs", "harness")]
    assert {one["name"] for one in stays} == {"redis", "rollout", "trainer", "weights", "monitor"}
    for container in stays:
        assert {"startupProbe", "livenessProbe"} <= container.keys()
        ports = {port["name"] for port in container["ports"]}
        probes = [container[key] for key in container if key.endswith("Probe")]
        assert all("exec" in probe or probe["httpGet"]["port"] in ports for probe in probes)


@EVERY_VARIANT
def test_services_and_budgets_find_their_pods(rendered: Rendered) -> None:
    labels = {app: workload["spec"]["template"]["metadata"]["labels"] for app, workload in rendered.workloads().items()}
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


@EVERY_VARIANT
def test_replicas_understand_their_environment(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RolloutSettings.load(given(rendered, "rollout", "rollout", monkeypatch))
    assert settings.redis_url == broker_url(rendered, "rollout")
    assert settings.run_id == rendered.run["id"]
    assert str(settings.model) == rendered.run["model"]
    assert settings.engine is (EngineName.TRANSFORMERS if rendered.variant == "cpu" else EngineName.SGLANG)
    assert settings.device == ("cuda" if rendered.variant == "gpu" else "cpu")
    (pause,) = rendered.container("rollout", "rollout")["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert rendered.pods()["rollout"]["terminationGracePeriodSeconds"] > int(pause) + settings.drain_s + 10


@EVERY_VARIANT
def test_the_trainer_announces_copies_of_the_weights_that_it_serves(
    rendered: Rendered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text((REPOSITORY / "deploy" / "demo" / "config.toml").read_text())
    trainer = TrainSettings.load(given(rendered, "trainer", "trainer", monkeypatch), tmp_path / "config.toml")
    served = WeightServerSettings.load(given(rendered, "trainer", "weights", monkeypatch))
    copied = WeightServerSettings.load(given(rendered, "weights", "weights", monkeypatch))
    assert trainer.run_id == rendered.run["id"]
    assert trainer.broker.redis_url == broker_url(rendered, "trainer")
    assert trainer.weights_folder == served.folder
    assert copied.upstream.url == f"http://trainer:{served.port}"
    assert trainer.weights.url == f"http://weights:{copied.port}"
    assert trainer.metrics.port == 9100
    assert trainer.model.device == ("cuda" if rendered.variant == "gpu" else "cpu")
    assert rendered.container("trainer", "weights")["restartPolicy"] == "Always", (
        "a sidecar: the job ends with the trainer"
    )


@EVERY_VARIANT
def test_copies_of_the_weights_outlive_their_pod_and_the_trainer(rendered: Rendered) -> None:
    """Two pods on one ReadWriteOnce volume would need the same node, which is not guaranteed."""
    written = {pod: names for pod, spec in rendered.pods().items() if (names := claims(spec) - {"models"})}
    assert written == {"trainer": {"runs"}, "weights": {"weights"}}
    mounts = {one["name"]: one["mountPath"] for one in rendered.container("weights", "weights")["volumeMounts"]}
    assert rendered.environment("weights", "weights")["DVP_WEIGHTS__FOLDER"] == mounts["copies"]
    assert rendered.one("Deployment", "weights")["spec"]["strategy"] == {"type": "Recreate"}


def claims(spec: Manifest) -> set[str]:
    found = [volume.get("persistentVolumeClaim", {}) for volume in spec["volumes"]]
    return {claim["claimName"] for claim in found if claim}


@EVERY_VARIANT
def test_what_was_trained_stays_when_the_release_is_gone(rendered: Rendered) -> None:
    kept = rendered.all("PersistentVolumeClaim")
    assert {claim["metadata"]["name"] for claim in kept} == {"runs", "weights"}
    assert all(claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"} for claim in kept)
    (queue,) = rendered.one("StatefulSet", "redis")["spec"]["volumeClaimTemplates"]
    assert queue["metadata"]["name"] == "data", "Kubernetes keeps those of a StatefulSet"


@EVERY_VARIANT
def test_inputs_are_copied_from_an_image_or_read_from_a_claim(rendered: Rendered) -> None:
    for pod in {"rollout", "trainer", "harness"} & rendered.pods().keys():
        spec = rendered.pods()[pod]
        copying = [one["name"] for one in spec.get("initContainers", []) if one["name"] == "inputs"]
        (volume,) = [one for one in spec["volumes"] if one["name"] == "inputs"]
        mounts = {one["mountPath"]: one for one in rendered.container(pod, pod)["volumeMounts"]}
        assert mounts["/inputs"] == {"name": "inputs", "mountPath": "/inputs", "readOnly": True}
        if rendered.variant == "all":
            assert copying == []
            assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        else:
            assert copying == ["inputs"]
            assert volume["emptyDir"].keys() == {"sizeLimit"}


def test_a_harness_plays_with_the_replicas_in_an_environment_of_the_inputs(
    everything: Rendered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = HarnessSettings.load(given(everything, "harness", "harness", monkeypatch))
    assert (settings.environment, settings.workers, settings.max_turns) == ("tasks.math:Proofs", 64, 20)
    (port,) = everything.one("Service", "rollout")["spec"]["ports"]
    assert settings.urls == (f"http://rollout:{port['port']}",)
    assert everything.container("harness", "harness")["workingDir"] == "/inputs"
    everything.mount("harness", "harness", tmp_path)
    assert settings.token_file is not None
    assert (tmp_path / settings.token_file.relative_to("/")).read_text() == everything.token(Scope.HARNESS)
    assert everything.one("NetworkPolicy", "harness")["spec"]["egress"] == [
        {"to": [{"podSelector": {"matchLabels": {"app": "rollout"}}}], "ports": [{"port": port["port"]}]}
    ]
    assert "harness" not in Rendered("cpu").pods(), "without an environment there is none"


@EVERY_VARIANT
def test_no_replica_is_killed_for_what_it_waits_for(rendered: Rendered) -> None:
    """A replica without weights, broker or engine is not ready, but a restart would bring none of them."""
    replica = rendered.container("rollout", "rollout")
    asked = {key: replica[key]["httpGet"]["path"] for key in replica if key.endswith("Probe")}
    assert asked == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}


@EVERY_VARIANT
def test_the_broker_is_asked_as_beside_compose(rendered: Rendered, tmp_path: Path) -> None:
    """tests/integration/transport/test_ping.py tests the answers."""
    broker = rendered.container("redis", "redis")
    asked = {key: broker[key]["exec"]["command"] for key in broker if key.endswith("Probe")}
    ping = "/etc/dvp-redis/ping.sh"
    alive, ready = ["sh", ping, "alive"], ["sh", ping, "ready"]
    assert asked == {"startupProbe": alive, "livenessProbe": alive, "readinessProbe": ready}
    rendered.mount("redis", "redis", tmp_path)
    redis = REPOSITORY / "deploy" / "redis"
    mounted = tmp_path / "etc" / "dvp-redis"
    assert {one.name: one.read_text() for one in mounted.iterdir()} == {
        one.name: one.read_text() for one in redis.iterdir()
    }
    assert (
        ready
        == yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]["redis"]["healthcheck"]["test"][
            1:
        ]
    )


@EVERY_VARIANT
def test_the_monitor_understands_its_environment(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = MonitorSettings.load(given(rendered, "monitor", "monitor", monkeypatch))
    assert (settings.port, settings.run_id) == (8080, rendered.run["id"])
    assert settings.redis_url == broker_url(rendered, "monitor")


@EVERY_VARIANT
def test_nobody_but_the_broker_knows_more_than_the_password_of_its_own_user(rendered: Rendered) -> None:
    passwords = {name: value for name, value in rendered.secret("redis").items() if name.endswith("_PASSWORD")}
    assert len({*passwords.values()}) == len(passwords) == 1 + len(Role)
    for pod, spec in rendered.pods().items():
        for one in spec["containers"] + spec.get("initContainers", []):
            seen = "".join(rendered.environment(pod, one["name"]).values())
            known = {name for name, password in passwords.items() if password in seen}
            own = {f"{pod.upper()}_REDIS_PASSWORD"} & passwords.keys() if one["name"] == pod else set()
            assert known == (set(passwords) if pod == "redis" else own), (pod, one["name"])


SERVED = {
    ("rollout", "rollout"): {Scope.OPERATE, Scope.HARNESS, Scope.ROLLOUT, Scope.READ},
    ("monitor", "monitor"): {Scope.OPERATE, Scope.HARNESS, Scope.ROLLOUT, Scope.READ},
    ("weights", "weights"): {Scope.WEIGHTS, Scope.READ},
    ("trainer", "weights"): {Scope.WEIGHTS, Scope.READ},
    ("trainer", "trainer"): {Scope.READ},
}
"""Scopes whose tokens a container sees: those of its callers."""


@EVERY_VARIANT
@pytest.mark.parametrize(("pod", "name"), SERVED)
def test_containers_know_their_callers_and_no_others(pod: str, name: str, rendered: Rendered, tmp_path: Path) -> None:
    rendered.mount(pod, name, tmp_path)
    variables = rendered.environment(pod, name)
    (folder,) = (value for key, value in variables.items() if key.endswith("__TOKEN_FOLDER"))
    tokens = ApiTokens(folder=tmp_path / folder.lstrip("/"))
    callers = {scope: tokens.find(rendered.token(scope).encode()) for scope in Scope}
    assert {scope for scope, caller in callers.items() if caller} == SERVED[pod, name]
    assert all(caller is None or caller.scope is scope for scope, caller in callers.items())


@EVERY_VARIANT
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


@EVERY_VARIANT
def test_a_new_token_starts_nothing_again(rendered: Rendered) -> None:
    """A job's template cannot be changed, and other pods are replaced when their template changes."""
    again = Rendered(rendered.variant)
    assert again.token(Scope.ROLLOUT) != rendered.token(Scope.ROLLOUT)
    assert again.workloads() == rendered.workloads()


def test_another_trainer_is_another_job() -> None:
    """A job's pod cannot be changed: `helm upgrade` would fail with "field is immutable"."""
    before = Rendered()
    names = {before.workloads()["trainer"]["metadata"]["name"]}
    changes: list[Manifest] = [
        {"trainer": {"settings": {"steps": 9}}},
        {"images": {"trainer": "dvp-rl/trainer:2"}},
        {"run": before.run | {"config": "other.toml"}},
        {"restart": "1"},
    ]
    for change in changes:
        after = Rendered("cpu", change)
        names.add(after.workloads()["trainer"]["metadata"]["name"])
        assert after.pods()["trainer"] != before.pods()["trainer"] or "restart" in change
    assert len(names) == 1 + len(changes)
    replicas = Rendered("cpu", {"rollout": {"replicas": 3}})
    assert replicas.workloads()["trainer"] == before.workloads()["trainer"], "the trainer goes on"
    assert replicas.workloads()["rollout"]["spec"]["replicas"] == 3


def test_a_restart_replaces_every_pod() -> None:
    """Needed after new passwords, which pods read when they start."""
    before, after = Rendered("all", {"restart": ""}), Rendered("all", {"restart": "1"})
    for app, workload in after.workloads().items():
        old, new = (one["spec"]["template"]["metadata"] for one in (before.workloads()[app], workload))
        assert new == old | {"annotations": old.get("annotations", {}) | {"dvp-rl/restart": "1"}}


def test_a_new_start_of_the_broker_replaces_it(tmp_path: Path) -> None:
    """The broker reads its mounted files only when it starts."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    with (chart / "files" / "redis" / "users.conf").open("a") as users:
        users.write("# another rule\n")
    before, after = (render({}, folder)["dvp-rl/templates/redis.yaml"] for folder in (CHART, chart))
    pods = [next(yaml.safe_load_all(text))["spec"]["template"] for text in (before, after)]
    assert pods[0]["metadata"] != pods[1]["metadata"]
    assert pods[0]["spec"] == pods[1]["spec"]


def test_secrets_are_drawn_for_each_namespace_anew() -> None:
    drawn = [value for one in secrets() + secrets() for value in one.get("stringData", {}).values()]
    drawn = [value for value in drawn if value != Role.SCALER]
    assert all(re.fullmatch("[0-9a-f]{48}", value) for value in drawn)
    assert len(set(drawn)) == len(drawn) == 2 * (1 + len(Role) + len(Scope))
    command = [REPOSITORY / "deploy" / "secrets.sh", "--kubernetes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "secrets.sh: --kubernetes needs a namespace\n")


def broker_url(rendered: Rendered, user: str) -> str:
    return f"redis://{user}:{rendered.secret('redis')[f'{user.upper()}_REDIS_PASSWORD']}@redis:6379/0"


def given(rendered: Rendered, pod: str, container: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sets the container's environment. Returns the arguments, of which there are none."""
    for name, value in rendered.environment(pod, container).items():
        if name.startswith("DVP_"):
            monkeypatch.setenv(name, value)
    return []


def test_replicas_scale_with_the_jobs_that_exist(everything: Rendered) -> None:
    spec = everything.one("ScaledObject", "rollout")["spec"]
    keys = Keys(everything.run["id"])
    triggers = [trigger["metadata"] for trigger in spec["triggers"]]
    assert {trigger["authenticationRef"]["name"] for trigger in spec["triggers"]} == {"redis"}
    assert {trigger["stream"]: trigger["streamLength"] for trigger in triggers} == {
        keys.jobs: str(96 // 16),
        keys.client_jobs: str(96 // 16 // 2),
    }
    for trigger in triggers:
        assert "consumerGroup" not in trigger, "KEDA would look at pending entries instead"
        assert trigger["address"] == f"redis.{NAMESPACE}.svc:6379"
    shown = {
        one["parameter"]: everything.secret(one["name"])[one["key"]]
        for one in everything.one("TriggerAuthentication", "redis")["spec"]["secretTargetRef"]
    }
    assert shown == {"username": Role.SCALER, "password": everything.secret("redis")["SCALER_REDIS_PASSWORD"]}
    assert "replicas" not in everything.one("Deployment", "rollout")["spec"], "each upgrade would undo KEDA's choice"


def test_zero_is_a_value() -> None:
    rendered = Rendered(
        "cpu", {"scaling": {"enabled": True}, "rollout": {"settings": {"drain_s": 0, "client_share": 0}}}
    )
    assert rendered.pods()["rollout"]["terminationGracePeriodSeconds"] == 45
    triggers = rendered.one("ScaledObject", "rollout")["spec"]["triggers"]
    assert triggers[1]["metadata"]["streamLength"] == "1", "KEDA divides by it"


def test_replicas_scale_as_their_defaults_say() -> None:
    rendered = Rendered("cpu", {"scaling": {"enabled": True}})
    triggers = rendered.one("ScaledObject", "rollout")["spec"]["triggers"]
    at_once = int(rendered.environment("rollout", "rollout")["DVP_ROLLOUT__MAX_BATCH"]) // SamplingSection().n
    share = float(rendered.environment("rollout", "rollout")["DVP_ROLLOUT__CLIENT_SHARE"])
    assert share == RolloutSettings.model_fields["client_share"].default
    assert [int(trigger["metadata"]["streamLength"]) for trigger in triggers] == [at_once, share * at_once]


@EVERY_VARIANT
def test_nobody_reaches_the_broker_but_those_who_need_it(rendered: Rendered) -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in rendered.all("NetworkPolicy")}
    assert policies["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    reaching = [
        peer
        for spec in policies.values()
        for rule in spec.get("ingress", [])
        if any(port["port"] == 6379 for port in rule.get("ports", []))
        for peer in rule["from"]
    ]
    pods, *scaler = reaching
    assert pods["podSelector"]["matchExpressions"][0]["values"] == ["rollout", "trainer", "monitor"]
    allowed = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "autoscaling"}}}]
    assert scaler == (allowed if rendered.variant == "all" else [])


@EVERY_VARIANT
def test_names_are_asked_for_where_clusters_answer(rendered: Rendered) -> None:
    (rule,) = rendered.one("NetworkPolicy", "names")["spec"]["egress"]
    namespaces, cache = rule["to"]
    assert namespaces["namespaceSelector"]["matchExpressions"][0]["values"] == ["kube-system", "openshift-dns"]
    assert cache == {"ipBlock": {"cidr": "169.254.20.10/32"}}
    assert {(port["protocol"], port["port"]) for port in rule["ports"]} == {
        (protocol, port) for protocol in ("UDP", "TCP") for port in (53, 5353)
    }


def test_weights_over_a_process_group_need_ports_and_an_interface(everything: Rendered, tmp_path: Path) -> None:
    ends = {"matchExpressions": [{"key": "app", "operator": "In", "values": ["rollout", "trainer"]}]}
    assert everything.one("NetworkPolicy", "transfers")["spec"] == {
        "podSelector": ends,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": ends}]}],
        "egress": [{"to": [{"podSelector": ends}]}],
    }
    assert everything.environment("rollout", "rollout")["DVP_ROLLOUT__SGLANG__INTERFACE"] == "eth0"
    assert everything.environment("trainer", "trainer")["DVP_TRAIN__WEIGHTS__INTERFACE"] == "eth0"
    over_http = Rendered()
    assert not [one for one in over_http.all("NetworkPolicy") if one["metadata"]["name"] == "transfers"]
    assert "DVP_TRAIN__WEIGHTS__INTERFACE" not in over_http.environment("trainer", "trainer")
    chosen = {"settings": {"weights": {"route": "distributed", "interface": "ib0"}}}
    settings = {"settings": {"max_batch": 8, "sglang": {"interface": "ib1"}}}
    own = Rendered("cpu", {"trainer": chosen, "rollout": settings})
    assert own.environment("rollout", "rollout")["DVP_ROLLOUT__SGLANG__INTERFACE"] == "ib1"
    assert own.environment("trainer", "trainer")["DVP_TRAIN__WEIGHTS__INTERFACE"] == "ib0"


def test_vllm_in_the_place_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = {"settings": {"engine": "vllm", "device": "cuda", "threads": None, "vllm": {"tp": 2}}}
    settings = RolloutSettings.load(given(Rendered("gpu", {"rollout": replicas}), "rollout", "rollout", monkeypatch))
    assert settings.engine is EngineName.VLLM
    assert settings.vllm.tp == 2


def test_prometheus_finds_every_pod_and_is_let_in(everything: Rendered) -> None:
    spec = everything.one("PodMonitor", "dvp-rl")["spec"]
    (selected,) = spec["selector"]["matchExpressions"]
    assert everything.workloads().keys() - selected["values"] == {"redis", "harness"}
    assert spec["jobLabel"] == selected["key"] == "app"
    endpoints = {endpoint["port"]: endpoint["authorization"]["credentials"] for endpoint in spec["podMetricsEndpoints"]}
    for app in selected["values"]:
        spec = everything.pods()[app]
        serving = [*spec["containers"], *spec.get("initContainers", [])]
        assert {port["name"] for one in serving for port in one["ports"]} <= endpoints.keys()
    assert all(shown == {"name": "tokens-read", "key": "prometheus"} for shown in endpoints.values())
    assert "prometheus" in everything.secret("tokens-read")
    for kind in ("PodMonitor", "PrometheusRule"):
        assert everything.one(kind, "dvp-rl")["metadata"]["labels"] == {"release": "prometheus"}
    letting_in = {
        policy["metadata"]["name"]
        for policy in everything.all("NetworkPolicy")
        if '"kubernetes.io/metadata.name": "observed"' in json.dumps(policy)
    }
    assert letting_in == {"weights", "trainer", "http"}


def test_alerts_are_those_of_compose_for_this_namespace(everything: Rendered) -> None:
    """One Prometheus may see several releases, so that the rules of each select its own namespace."""
    spec = everything.one("PrometheusRule", "dvp-rl")["spec"]
    for rule in spec["groups"][0]["rules"]:
        own, rest = re.subn(f'namespace="{NAMESPACE}",?', "", rule["expr"])
        assert rest == len(re.findall(r"(?:up|dvp_\w+)\b", own)) == 1, rule["expr"]
        rule["expr"] = own.replace("{}", "")
    assert spec == yaml.safe_load((REPOSITORY / "deploy" / "prometheus" / "alerts.yml").read_text())


def test_ways_out_are_those_that_were_asked_for(everything: Rendered) -> None:
    spec = everything.one("NetworkPolicy", "from-trainer")["spec"]
    assert spec["podSelector"] == {"matchLabels": {"app": "trainer"}}
    assert spec["egress"] == VARIANTS["all"]["trainer"]["egress"]
    assert everything.pods()["trainer"]["nodeSelector"] == {"pool": "gpu"}
    assert everything.one("NetworkPolicy", "from-harness")["spec"]["egress"] == VARIANTS["all"]["harness"]["egress"]
    names = {policy["metadata"]["name"] for policy in everything.all("NetworkPolicy")}
    assert "from-rollout" not in names


@EVERY_VARIANT
def test_weights_go_from_the_trainer_to_their_copies_and_from_there_to_replicas(rendered: Rendered) -> None:
    """Both ends of each connection allow it, and no other pod may connect."""
    allowed = {"Ingress": set[tuple[str, str]](), "Egress": set[tuple[str, str]]()}
    for policy in rendered.all("NetworkPolicy"):
        spec = policy["spec"]
        for direction, peers in (("Ingress", "from"), ("Egress", "to")):
            for rule in spec.get(direction.lower(), ()):
                if {"port": 8200} in rule.get("ports", ()):
                    others = {app for peer in rule[peers] for app in apps(peer.get("podSelector", {}))}
                    ends = {(own, other) for own in apps(spec["podSelector"]) for other in others}
                    allowed[direction] |= ends if direction == "Egress" else {(other, own) for own, other in ends}
    assert (
        allowed["Ingress"]
        == allowed["Egress"]
        == {("rollout", "weights"), ("trainer", "weights"), ("weights", "trainer")}
    )


def apps(selector: Manifest) -> list[str]:
    """Apps whose pods the selector selects."""
    (found,) = [one["values"] for one in selector.get("matchExpressions", ())] or [[]]
    return [*found, *selector.get("matchLabels", {}).values()]


@EVERY_VARIANT
def test_gpus_are_asked_for_where_they_are_used(rendered: Rendered) -> None:
    asking = {one["name"] for one in all_containers(rendered) if "nvidia.com/gpu" in one["resources"]["limits"]}
    assert asking == ({"rollout", "trainer"} if rendered.variant == "gpu" else set())


@EVERY_VARIANT
def test_images_are_ours_or_the_broker(rendered: Rendered) -> None:
    stages = set(re.findall(r" AS (\w+)$", (REPOSITORY / "deploy/docker/Dockerfile").read_text(), re.MULTILINE))
    for container in all_containers(rendered):
        name = container["image"].split(":")[0]
        assert name == "redis" or name.removeprefix("dvp-rl/") in stages | {"inputs", "rollout-sglang"}


def test_no_secret_is_committed() -> None:
    names = [".env", ".secrets/tokens/read/prometheus"]
    listed = subprocess.run(["git", "check-ignore", *names], cwd=REPOSITORY, capture_output=True, text=True)
    assert listed.stdout.split() == names
    assert not any("kind: Secret" in path.read_text() for path in (CHART / "templates").iterdir())
