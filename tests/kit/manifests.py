"""deploy/kubernetes as a cluster would see it: the rendered chart, and the generated secrets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from dvp_rl.http.api_tokens import Scope
from tests.kit.helm import CHART, NAMESPACE, render
from tests.kit.wait import WITHIN_S

REPOSITORY = Path(__file__).parents[2]

Manifest = dict[str, Any]

DEMO: dict[str, str] = yaml.safe_load((CHART / "values.yaml").read_text())["run"]
OWN_RUN = {"id": "qwen3-math", "model": "models/Qwen3-0.6B", "config": "math.toml"}
VARIANTS: dict[str, Manifest] = {
    "cpu": {},
    "gpu": {**yaml.safe_load((CHART / "values-gpu.yaml").read_text()), "run": OWN_RUN},
    "all": {
        "run": OWN_RUN,
        "inputs": {"claim": "models"},
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [{"name": "registry"}],
        "rollout": {
            "settings": {
                "engine": "sglang",
                "max_batch": 96,
                "client_share": 0.5,
                "drain_s": 119.5,
                "sglang": {"tp": 2},
            },
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
            "affinity": {"nodeAffinity": {}},
        },
        "scaling": {"enabled": True, "samplesPerJob": 16, "namespace": "autoscaling"},
        "trainer": {
            "settings": {"steps": 3_000_000, "weights": {"route": "distributed"}},
            "egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 443}]}],
            "nodeSelector": {"pool": "gpu"},
            "volume": {"storageClass": "fast"},
        },
        "harness": {
            "environment": "tasks.math:Proofs",
            "replicas": 3,
            "settings": {"workers": 64, "max_turns": 20},
            "egress": [{"to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}], "ports": [{"port": 443}]}],
        },
        "prometheus": {"enabled": True, "namespace": "observed", "labels": {"release": "prometheus"}},
        "restart": "2",
    },
}
"""Chart values: the defaults, values-gpu.yaml, and every option switched on."""


def secrets() -> list[Manifest]:
    """Newly generated secrets."""
    command = ["deploy/secrets.sh", "--kubernetes", NAMESPACE]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=WITHIN_S)
    return list(yaml.safe_load_all(done.stdout))


class Rendered:
    """The rendered manifests of a variant. `overlay` replaces the variant's top-level values."""

    def __init__(self, variant: str = "cpu", overlay: Manifest | None = None) -> None:
        self.variant = variant
        values = VARIANTS[variant] | (overlay or {})
        self.run: dict[str, str] = values.get("run", DEMO)
        self.texts = render(values)
        files = [text for name, text in self.texts.items() if name.endswith(".yaml")]
        self.manifests = [one for text in files for one in yaml.safe_load_all(text) if one]
        self.manifests += secrets()

    def all(self, *kinds: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] in kinds]

    def one(self, kind: str, name: str) -> Manifest:
        (found,) = [manifest for manifest in self.all(kind) if manifest["metadata"]["name"] == name]
        return found

    def workloads(self) -> dict[str, Manifest]:
        """Workloads by the label `app` of their pods."""
        found = self.all("Deployment", "StatefulSet", "Job")
        return {one["spec"]["template"]["metadata"]["labels"]["app"]: one for one in found}

    def pods(self) -> dict[str, Manifest]:
        """Pod spec of every workload, by the label `app`."""
        return {app: workload["spec"]["template"]["spec"] for app, workload in self.workloads().items()}

    def container(self, pod: str, name: str) -> Manifest:
        spec = self.pods()[pod]
        (found,) = [one for one in spec["containers"] + spec.get("initContainers", []) if one["name"] == name]
        return dict(found)

    def environment(self, pod: str, name: str) -> dict[str, str]:
        """The container's environment, with references resolved and $(NAME) expanded."""
        container = self.container(pod, name)
        sources = [self.secret(source["secretRef"]["name"]) for source in container.get("envFrom", ())]
        resolved = {key: value for secret in sources for key, value in secret.items()}
        for entry in container.get("env", ()):
            value = self._referenced(entry["valueFrom"]) if "valueFrom" in entry else entry["value"]
            resolved[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: resolved[match[1]], value)
        return resolved

    def secret(self, name: str) -> dict[str, str]:
        """The secret's files by name."""
        return dict(self.one("Secret", name)["stringData"])

    def token(self, scope: Scope) -> str:
        """The token of the only caller generated for the scope."""
        (token,) = self.secret(f"tokens-{scope}").values()
        return token

    def mount(self, pod: str, name: str, folder: Path) -> None:
        """Writes the container's mounted secrets and config files below `folder`."""
        volumes = {volume["name"]: volume for volume in self.pods()[pod]["volumes"]}
        for mount in self.container(pod, name)["volumeMounts"]:
            files = self.files(volumes.get(mount["name"], {}))
            place = folder / mount["mountPath"].lstrip("/")
            if files:
                place.mkdir(parents=True, exist_ok=True)
            for key, value in files.items():
                (place / key).write_text(value)

    def files(self, volume: Manifest) -> dict[str, str]:
        """A volume's files by name; empty for a volume that is not made from a manifest."""
        if "secret" in volume:
            return self.secret(volume["secret"]["secretName"])
        if "configMap" in volume:
            return dict(self.one("ConfigMap", volume["configMap"]["name"])["data"])
        return {}

    def _referenced(self, source: Manifest) -> str:
        reference = source["secretKeyRef"]
        return self.secret(reference["name"])[reference["key"]]
