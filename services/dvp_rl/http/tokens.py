"""Who may call, and for what. A token has a scope and the name of its caller; both come from where it is written:

    FOLDER/SCOPE/NAME        tokens/rollout/alice holds alice's token, or several, one per line

The folder is read again while it is served, so that tokens come and go without a restart.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.shares import EVERYBODY

logger = logging.getLogger("dvp_rl.tokens")
"""Not one of those that strangers can make speak (services/dvp_rl/logs.py)."""

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

    @property
    def limited(self) -> str:
        """Its name, or EVERYBODY if it has no limits of its own: replicas share a token of scope `weights`, and without
        tokens all callers are one."""
        return self.name if self.scope in (Scope.READ, Scope.ROLLOUT) else EVERYBODY


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
        for problem in self._problems:
            if problem not in reported:
                logger.error("%s", problem)
        for what, some, others in (("no longer accepted", before, self._known), ("accepted", self._known, before)):
            for caller in set(some.values()) - set(others.values()):
                logger.info("a token of %s/%s is %s", caller.scope, caller.name, what)

    def _read(self) -> dict[bytes, Caller]:
        """What the folder holds now; what is wrong with the rest of it is in `_problems`."""
        self._problems = []
        found: dict[bytes, Caller] = {}
        for scope, path in self._files():
            try:
                tokens = _tokens_of(path)
            except (OSError, ValueError) as error:
                self._problem(path, error)
                continue
            for digest in map(_digest, tokens):
                caller = Caller(path.name, scope, digest)
                first = self._listed.get(digest) or found.setdefault(digest, caller)
                if first != caller:
                    self._problem(path, ValueError(f"holds a token of {first.scope}/{first.name}, and counts as that"))
        return found

    def _files(self) -> Iterator[tuple[Scope, Path]]:
        """Scopes that allow least come first."""
        if self._folder is None:
            return
        for name in self._names(self._folder) - set(Scope):
            self._problem(self._folder / name, ValueError(f"no scope; expected {', '.join(Scope)}"))
        for scope in Scope:
            folder = self._folder / scope
            if folder.exists() or folder.is_symlink():
                yield from ((scope, folder / name) for name in sorted(self._names(folder)))

    def _names(self, folder: Path) -> set[str]:
        """Kubernetes mounts a secret as links to a hidden folder beside them."""
        try:
            return {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        except OSError as error:
            self._problem(folder, error)
            return set()

    def _problem(self, path: Path, error: OSError | ValueError) -> None:
        """A name may hold anything; as it is quoted, nobody writes lines of a log by it."""
        reason = error.strerror if isinstance(error, OSError) else error
        self._problems.append(f"token_folder: {str(path)!r}: {reason}")


def check_token(token: str) -> None:
    """Raises ValueError, which does not say the token, for one that can be guessed or cannot be sent."""
    if len(token) < MIN_CHARS:
        remedy = "openssl rand -hex 24 makes a good one"
        raise ValueError(f"a token has {len(token)} characters, at least {MIN_CHARS} are needed: {remedy}")
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(
            "a token has characters that no header can hold: only printable ASCII without spaces is allowed"
        )


def read_tokens(path: Path) -> list[str]:
    """The tokens in a file, one per line. Raises OSError, and ValueError, which does not say them."""
    # Opening a pipe would wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("no ordinary file")
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
    lines = [line.strip(" \t\r") for line in data.decode("latin-1").split("\n")]
    tokens = [line for line in lines if line]
    if not tokens:
        raise ValueError("holds no token")
    for token in tokens:
        check_token(token)
    return tokens


def _tokens_of(path: Path) -> list[str]:
    """Raises as `read_tokens`; what was removed since it was listed holds none."""
    if not NAME.fullmatch(path.name):
        raise ValueError(f"no name of a caller; expected {NAME.pattern}")
    try:
        return read_tokens(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise
        return []


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
