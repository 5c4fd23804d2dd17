"""Who may call, and for what. A token has a scope and the name of its caller; both come from where it is written:

    FOLDER/SCOPE/NAME        tokens/rollout/alice holds alice's token, or several, a line each

The folder is read again while it is served, so that tokens come and go without a restart.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from services.contract.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_CHARS = 16
MAX_FILE_BYTES = 4096
FRESH_S = 1.0
"""Older than this, what was read is read again at the next call."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Of a caller. Copies that editors leave behind (alice~, alice.bak) are none."""


class Scope(StrEnum):
    READ = "read"
    """The queue, the monitor's page, metrics."""
    ROLLOUT = "rollout"
    """READ, and samples and jobs."""
    WEIGHTS = "weights"
    """Files of published weights."""
    OPERATE = "operate"
    """Everything."""

    def includes(self, other: Scope) -> bool:
        return other is self or self is Scope.OPERATE or (self, other) == (Scope.ROLLOUT, Scope.READ)


@dataclass(frozen=True)
class Caller:
    name: str
    scope: Scope
    digest: bytes = field(default=b"", repr=False)
    """SHA-256 of the token; empty where none is asked for."""


class Tokens:
    """Tokens are looked up by their digest, so that timing tells nothing about them."""

    def __init__(self, listed: Sequence[str] = (), folder: Path | None = None) -> None:
        """`listed`: tokens for everything. Raises ConfigError for a folder that holds none, or anything else."""
        callers = (Caller("token", Scope.OPERATE, _digest(token)) for token in listed)
        self._listed = {caller.digest: caller for caller in callers}
        self._folder = folder
        self._problems: list[str] = []
        self._known = self._listed | self._read()
        self._read_at = time.monotonic()
        if folder is not None and not self._problems and len(self._known) == len(self._listed):
            self._problems = [
                f"token_folder {folder}: holds no token; expected {folder}/SCOPE/NAME, e.g. rollout/alice"
            ]
        if self._problems:
            raise ConfigError("\n".join(self._problems))

    def __bool__(self) -> bool:
        """Whether callers need one. A folder that was emptied lets nobody in."""
        return bool(self._listed) or self._folder is not None

    def find(self, token: bytes) -> Caller | None:
        self._refresh()
        return self._known.get(hashlib.sha256(token).digest())

    def still_has(self, caller: Caller) -> bool:
        """False once the token that the caller showed is gone."""
        self._refresh()
        return not self or self._known.get(caller.digest) == caller

    def _refresh(self) -> None:
        if self._folder is None or time.monotonic() - self._read_at < FRESH_S:
            return
        before, reported = self._known, self._problems
        self._known = self._listed | self._read()
        self._read_at = time.monotonic()
        if self._problems != reported:
            for problem in self._problems:
                logger.error("%s; its tokens are refused", problem)
        for what, some, others in (("accepted", self._known, before), ("no longer accepted", before, self._known)):
            for caller in (some[digest] for digest in some.keys() - others.keys()):
                logger.info("a token of %s/%s is %s", caller.scope, caller.name, what)

    def _read(self) -> dict[bytes, Caller]:
        """What the folder holds now; what is wrong with the rest of it is in `_problems`."""
        self._problems = []
        found: dict[bytes, Caller] = {}
        for scope, path in self._files():
            try:
                tokens = _tokens_of(path)
            except FileNotFoundError:
                continue  # removed a moment ago
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                self._problems.append(f"token_folder: {path}: {reason}")
                continue
            for digest in map(_digest, tokens):
                caller = Caller(path.name, scope, digest)
                if found.setdefault(digest, caller) != caller or digest in self._listed:
                    self._problems.append(f"token_folder: {path}: holds a token that another caller has, too")
        return found

    def _files(self) -> Iterator[tuple[Scope, Path]]:
        """Scopes that allow least come first."""
        if self._folder is None:
            return
        try:
            unknown = _visible(self._folder) - set(Scope)
            for name in sorted(unknown):
                self._problems.append(f"token_folder: {self._folder / name}: no scope; expected {', '.join(Scope)}")
            for scope in Scope:
                if (folder := self._folder / scope).exists():
                    yield from ((scope, folder / name) for name in sorted(_visible(folder)))
        except OSError as error:
            self._problems.append(f"token_folder: {error.filename}: {error.strerror}")


def check_token(token: str) -> None:
    """Raises ValueError, which does not say the token, for one that can be guessed or cannot be sent."""
    if len(token) < MIN_CHARS:
        remedy = "openssl rand -hex 24 makes a good one"
        raise ValueError(f"a token has {len(token)} characters, at least {MIN_CHARS} are needed: {remedy}")
    if not all("!" <= character <= "~" for character in token):
        raise ValueError("a token has characters that no header can hold: only printable ASCII is allowed")


def split_tokens(text: str) -> list[str]:
    """Raises ValueError as `check_token` does."""
    tokens = re.split(r"[,\s]+", text.strip())
    for token in tokens:
        check_token(token)
    return tokens


def _tokens_of(path: Path) -> list[str]:
    """Raises OSError, and ValueError without the text."""
    if not NAME.fullmatch(path.name):
        raise ValueError(f"no name of a caller: expected {NAME.pattern}")
    if not path.is_file() and path.exists():
        raise ValueError("no ordinary file")  # opening a pipe would wait for its writer
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
    if not data.strip():
        raise ValueError("holds no token")
    return split_tokens(data.decode("latin-1"))


def _visible(folder: Path) -> set[str]:
    """Kubernetes mounts a secret as links to a hidden folder beside them."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
