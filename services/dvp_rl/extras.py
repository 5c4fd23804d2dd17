"""What an installation consists of: its version, and the command that adds one of its extras."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution, requires
from shlex import quote
from urllib.parse import unquote, urlsplit

NAME = "dvp-rl"


def version() -> str:
    """The installed version; "unknown" if the package runs from a folder that was never installed."""
    try:
        return distribution(NAME).version
    except PackageNotFoundError:
        return "unknown"


def print_version(asked: bool) -> None:
    """Callback of a --version option."""
    if asked:
        sys.stdout.write(f"{NAME} {version()}\n")
        raise SystemExit(0)


@contextmanager
def needing(extra: str, program: str) -> Iterator[None]:
    """For a program that is installed with an extra: if a package of any extra is missing, says how to install `extra`,
    and exits with code 2."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not in_an_extra(error.name or ""):
            raise
        sys.stderr.write(f"{program}: error: needs {error.name}, which is not installed: {pip_install(extra)}\n")
        raise SystemExit(2) from None


def pip_install(extra: str) -> str:
    """The command that adds `extra` to this installation, from where it was installed: a folder, a file, a repository
    (PEP 610), or else the package index."""
    try:
        recorded = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        recorded = None
    return f"{quote(sys.executable)} -m pip install {_requirement(extra, json.loads(recorded or '{}'))}"


def in_an_extra(module: str) -> bool:
    """Whether the package of a module belongs to an extra."""
    name = module.partition(".")[0].replace("_", "-").lower()
    try:
        requirements = requires(NAME) or []
    except PackageNotFoundError:
        return False
    return any(re.match(rf"{re.escape(name)}\b.*extra *==", text, re.IGNORECASE) for text in requirements)


def _requirement(extra: str, origin: dict[str, dict[str, object]]) -> str:
    """`origin`: the content of direct_url.json."""
    url = str(origin.get("url", ""))
    if not url:
        return quote(f"{NAME}[{extra}]")
    if "dir_info" in origin:
        folder = quote(f"{unquote(urlsplit(url).path)}[{extra}]")
        return f"-e {folder}" if origin["dir_info"].get("editable") else folder
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return quote(f"{NAME}[{extra}] @ {url}")
