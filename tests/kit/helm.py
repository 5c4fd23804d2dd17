"""The chart as `helm install` would send it, rendered by Helm's own engine.

    python -m tests.kit.helm CHART < VALUES.json

prints the manifests by file, as JSON, or exits with Helm's error. It is a separate process because the engine is a Go
runtime, whose threads and signal handlers must not affect the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kit.wait import WITHIN_S

CHART = Path(__file__).parents[2] / "deploy" / "kubernetes" / "chart"
NAMESPACE = "training"


class HelmError(Exception):
    """Helm's error about a chart or its values."""


def render(values: dict[str, Any], chart: Path = CHART) -> dict[str, str]:
    """Manifests by template name. Raises HelmError."""
    command = [sys.executable, "-m", __name__, str(chart)]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=WITHIN_S)
    if done.returncode:
        raise HelmError(done.stderr)
    return dict(json.loads(done.stdout))


def main() -> None:
    from helm_python.chart import Chart, lint
    from helm_python.errors import HelmError as Refusal

    chart, values = sys.argv[1], json.load(sys.stdin)
    try:
        report = lint(chart, values, strict=True, namespace=NAMESPACE)
        manifests = Chart.load(chart).render(values, name="dvp-rl", namespace=NAMESPACE)
    except Refusal as error:
        sys.exit(str(error))
    if report["errors"]:
        sys.exit("\n".join(report["errors"]))
    json.dump(manifests, sys.stdout)


if __name__ == "__main__":
    main()
