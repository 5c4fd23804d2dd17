"""deploy/kubernetes as `kubectl apply -k` would send it."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.http.tokens import Scope
from tests.kit.wait import WITHIN_S

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "deploy" / "kubernetes"

Manifest = dict[str, Any]


def renderer() -> list[str]:
    """Skips the test, and says so, where there is neither command; the base is checked without."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            return command
    pytest.skip("NOT TESTED: neither kustomize nor kubectl here")


def copy_of(overlay: str, folder: Path) -> Path:
    """The overlay in a copy of all that it is made of, without secrets."""
    for source in (FOLDER, FOLDER.parent / "redis"):
        shutil.copytree(source, folder / source.name, ignore=lambda _, names: {".env", ".secrets"} & set(names))
    return folder / FOLDER.name / "overlays" / overlay


class Rendered:
    def __init__(self, overlay: str, folder: Path) -> None:
        """Rendered in a copy in `folder`, with secrets of its own."""
        command = renderer()
        copy = copy_of(overlay, folder)
        subprocess.run([REPOSITORY / "deploy" / "secrets.sh", copy], check=True, capture_output=True, timeout=WITHIN_S)
        done = subprocess.run([*command, str(copy)], capture_output=True, text=True, timeout=WITHIN_S)
        assert done.returncode == 0, done.stderr
        self.overlay = overlay
        self.manifests: list[Manifest] = list(yaml.safe_load_all(done.stdout))

    def all(self, *kinds: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] in kinds]

    def one(self, kind: str, prefix: str) -> Manifest:
        (found,) = [manifest for manifest in self.all(kind) if manifest["metadata"]["name"].startswith(prefix)]
        return found

    def pods(self) -> dict[str, Manifest]:
        """Spec of every workload's pods."""
        workloads = self.all("Deployment", "StatefulSet", "Job")
        return {workload["metadata"]["name"]: workload["spec"]["template"]["spec"] for workload in workloads}

    def container(self, pod: str, name: str) -> Manifest:
        spec = self.pods()[pod]
        (found,) = [one for one in spec["containers"] + spec.get("initContainers", []) if one["name"] == name]
        return dict(found)

    def environment(self, pod: str, name: str) -> dict[str, str]:
        """As the container would see it: references resolved, $(NAME) put in."""
        container = self.container(pod, name)
        sources = [self.secret(source["secretRef"]["name"]) for source in container.get("envFrom", ())]
        resolved = {key: value for secret in sources for key, value in secret.items()}
        for entry in container.get("env", ()):
            value = self._referenced(entry["valueFrom"]) if "valueFrom" in entry else entry["value"]
            resolved[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: resolved[match[1]], value)
        return resolved

    def secret(self, name: str) -> dict[str, str]:
        """What a volume of this secret holds, by file name."""
        data = self.one("Secret", name)["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def token(self, scope: Scope) -> str:
        """Of the caller that the overlay draws one for."""
        (token,) = self.secret(f"tokens-{scope}").values()
        return token

    def mount(self, pod: str, name: str, folder: Path) -> None:
        """The container's secrets and files of configuration, below `folder`."""
        volumes = {volume["name"]: volume for volume in self.pods()[pod]["volumes"]}
        for mount in self.container(pod, name)["volumeMounts"]:
            files = self.files(volumes.get(mount["name"], {}))
            place = folder / mount["mountPath"].lstrip("/")
            if files:
                place.mkdir(parents=True, exist_ok=True)
            for key, value in files.items():
                (place / key).write_text(value)

    def files(self, volume: Manifest) -> dict[str, str]:
        """By name; none for a volume that is not made of a manifest."""
        if "secret" in volume:
            return self.secret(volume["secret"]["secretName"])
        if "configMap" in volume:
            return dict(self.one("ConfigMap", volume["configMap"]["name"])["data"])
        return {}

    def _referenced(self, source: Manifest) -> str:
        ((kind, reference),) = source.items()
        if kind == "secretKeyRef":
            return self.secret(reference["name"])[reference["key"]]
        return str(self.one("ConfigMap", reference["name"])["data"][reference["key"]])
