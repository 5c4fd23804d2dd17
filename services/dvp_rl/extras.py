"""What an installation consists of: its version, and the command that adds one of its extras."""

from __future__ import annotations

import json
import re
import sys
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


def require(extra: str, program: str) -> None:
    """If packages of an extra that a program needs are missing, says how to install it, and exits with code 2. Nothing
    is required where the project runs from a folder that was never installed, as in its images."""
    try:
        absent = [name for name in _packages(extra) if not _is_installed(name)]
    except PackageNotFoundError:
        return
    if absent:
        sys.stderr.write(f"{program}: error: not installed: {', '.join(absent)}. {pip_install(extra)}\n")
        raise SystemExit(2)


def pip_install(extra: str) -> str:
    """The command that adds `extra` to this installation, from where it was installed: a folder, a file, a repository
    (PEP 610), or else the package index."""
    try:
        recorded = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        recorded = None
    return f"{quote(sys.executable)} -m pip install {_requirement(extra, json.loads(recorded or '{}'))}"


def _packages(extra: str) -> list[str]:
    """The packages of an extra. Hatchling lists those of the extras inside it, too."""
    matches = (re.match(rf"([\w.-]+).*; extra == '{extra}'$", line) for line in requires(NAME) or ())
    return [match[1] for match in matches if match]


def _is_installed(package: str) -> bool:
    try:
        return bool(distribution(package))
    except PackageNotFoundError:
        return False


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
