"""Checks the image of a replica with SGLang as far as possible without building it."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

from dvp_rl.sglang_plugin.versions import TESTED
from tests.kit.images import DOCKER, packages, pinned

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = DOCKER / "sglang.Dockerfile"
IGNORED = DOCKERFILE.with_name("sglang.Dockerfile.dockerignore")


def lines(file: Path) -> list[str]:
    text = re.sub(r"\\\n", " ", file.read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def copied() -> list[str]:
    """Paths copied from the build context."""
    copies = [shlex.split(line)[1:] for line in lines(DOCKERFILE) if line.startswith("COPY ")]
    return [source for words in copies if not words[0].startswith("--from") for source in words[:-1]]


def is_in_context(path: str) -> bool:
    """The last line that matches the path or a folder above it decides."""
    above = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    kept = True
    for pattern in lines(IGNORED):
        if any(fnmatch(name, pattern.removeprefix("!")) for name in above):
            kept = pattern.startswith("!")
    return kept


def test_everything_copied_is_there() -> None:
    assert len(copied()) > 5
    for source in copied():
        assert (REPOSITORY / source).exists(), source
        assert is_in_context(source), source
    assert not is_in_context("tests/kit/models.py")
    assert not is_in_context("deploy/demo/model")


def test_it_is_a_sglang_that_the_plugin_was_tested_with() -> None:
    (image,) = [line.partition("=")[2] for line in lines(DOCKERFILE) if line.startswith("ARG SGLANG_IMAGE=")]
    assert image.rpartition(":v")[2] in TESTED


def test_the_environment_of_the_replica_has_its_pins() -> None:
    """Every requirement of the image is in the lock file, so that `-c requirements.lock` holds it."""
    (names,) = packages(DOCKERFILE).values()
    assert {"fastapi", "transformers"} <= names <= pinned()
    assert "torch" not in names
