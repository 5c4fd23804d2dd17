"""Checks the images of a replica with SGLang or vLLM as far as possible without building them."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest

from dvp_rl.sglang_plugin import versions as sglang_versions
from dvp_rl.vllm_plugin import versions as vllm_versions
from tests.kit.images import DOCKER, packages, pinned

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = DOCKER / "server.Dockerfile"
SERVERS = {"sglang": sglang_versions.TESTED, "vllm": vllm_versions.TESTED}
IGNORED = DOCKERFILE.with_name("server.Dockerfile.dockerignore")


def lines(file: Path) -> list[str]:
    text = re.sub(r"\\\n", " ", file.read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def copied(server: str) -> list[str]:
    """Paths copied from the build context."""
    copies = [shlex.split(line)[1:] for line in lines(DOCKERFILE) if line.startswith("COPY ")]
    sources = [source for words in copies if not words[0].startswith("--from") for source in words[:-1]]
    return [source.replace("${SERVER}", server) for source in sources]


def is_in_context(path: str) -> bool:
    """The last line that matches the path or a folder above it decides."""
    above = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    kept = True
    for pattern in lines(IGNORED):
        if any(fnmatch(name, pattern.removeprefix("!")) for name in above):
            kept = pattern.startswith("!")
    return kept


@pytest.mark.parametrize("server", SERVERS)
def test_everything_copied_is_there(server: str) -> None:
    assert len(copied(server)) > 5
    for source in copied(server):
        assert (REPOSITORY / source).exists(), source
        assert is_in_context(source), source
    assert not is_in_context("tests/kit/models.py")
    assert not is_in_context("deploy/demo/model")


@pytest.mark.parametrize("server", SERVERS)
def test_it_is_a_server_that_the_plugin_was_tested_with(server: str) -> None:
    (image,) = [words[1] for line in lines(DOCKERFILE) if (words := line.split())[0] == "FROM" and words[-1] == server]
    assert image.rpartition(":v")[2] in SERVERS[server]


def test_the_environment_of_the_replica_has_its_pins() -> None:
    """Every requirement of the image is in the lock file, so that `-c requirements.lock` holds it."""
    (names,) = packages(DOCKERFILE).values()
    assert {"fastapi", "transformers"} <= names <= pinned()
    assert "torch" not in names
