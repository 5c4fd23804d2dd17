"""The contract is what everybody imports, so it must not drag anything heavy in."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "redis", "fastapi", "httpx")


def _imported_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_contract_imports_without_heavy_packages() -> None:
    modules = ("arrays", "errors", "group", "http", "job", "keys", "record", "sampling", "weights")
    assert _imported_by(f"from services.contract import {', '.join(modules)}") == set()


@pytest.mark.parametrize("module", ["health", "groups", "jobs", "submission", "weights", "embedded"])
def test_transport_needs_redis_only(module: str) -> None:
    assert _imported_by(f"import services.transport.{module}") <= {"redis"}
