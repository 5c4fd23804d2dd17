"""Access tokens. The path of a token's file determines its scope and the name of its caller:

    FOLDER/SCOPE/NAME        tokens/rollout/alice holds alice's token, or several, one per line

The folder is reread while the service runs, so that tokens can be added and removed without a restart.
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
"""Named outside `dvp_rl.http`, whose lines are limited because outsiders can trigger them (services/dvp_rl/logs.py)."""

MIN_CHARS = 16
MAX_FILE_BYTES = 4096
FRESH_S = 1.0
"""Age at which the next call rereads the folder, in seconds."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Name of a caller. Backup copies that editors leave behind (alice~, alice.bak) do not match."""


class Scope(StrEnum):
    """What a token is good for."""

    READ = "read"
    """The queue, the monitor's page, metrics."""
    ROLLOUT = "rollout"
    """READ, plus samples and jobs."""
    HARNESS = "harness"
    """ROLLOUT, plus episodes of the training run: what their rewards are worth, the model becomes."""
    WEIGHTS = "weights"
    """Files of published weights."""
    OPERATE = "operate"
    """Everything."""

    def includes(self, other: Scope) -> bool:
        ladder = (Scope.READ, Scope.ROLLOUT, Scope.HARNESS)
        below = self in ladder and other in ladder and ladder.index(other) < ladder.index(self)
        return other is self or self is Scope.OPERATE or below


@dataclass(frozen=True)
class Caller:
    name: str
    scope: Scope
    digest: bytes = field(default=b"", repr=False)
    """SHA-256 of the token; empty if no token is needed."""

    @property
    def limited(self) -> str:
        """The name that the caller's limits apply to, or EVERYBODY if it has none of its own: replicas share a token of
        scope `weights`, and without tokens all callers count as one."""
        return self.name if self.scope in (Scope.READ, Scope.ROLLOUT, Scope.HARNESS) else EVERYBODY


class ApiTokens:
    """The accepted tokens, looked up by digest, so that timing reveals nothing about them."""

    def __init__(self, listed: Sequence[str] = (), folder: Path | None = None) -> None:
        """`listed`: tokens of scope `operate`. Raises ConfigError if the folder holds no token, or anything else."""
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
        """Whether callers need a token. An emptied folder lets nobody in."""
        return bool(self._listed) or self._folder is not None

    def find(self, token: bytes) -> Caller | None:
        self._refresh()
        return self._known.get(hashlib.sha256(token).digest())

    def still_has(self, caller: Caller) -> bool:
        """False once the caller's token was removed, or moved to another scope or name."""
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
        """The valid tokens in the folder, by digest. Reports everything else in `_problems`."""
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
                    self._problem(path, ValueError(f"repeats a token of {first.scope}/{first.name}, and counts as it"))
        return found

    def _files(self) -> Iterator[tuple[Scope, Path]]:
        """Token files with their scopes, READ first and OPERATE last."""
        if self._folder is None:
            return
        for name in self._names(self._folder) - set(Scope):
            self._problem(self._folder / name, ValueError(f"not a scope; expected {', '.join(Scope)}"))
        for scope in Scope:
            folder = self._folder / scope
            if folder.exists() or folder.is_symlink():
                yield from ((scope, folder / name) for name in sorted(self._names(folder)))

    def _names(self, folder: Path) -> set[str]:
        """Names in the folder but hidden ones: Kubernetes mounts a secret as links to a hidden folder beside them."""
        try:
            return {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        except OSError as error:
            self._problem(folder, error)
            return set()

    def _problem(self, path: Path, error: OSError | ValueError) -> None:
        """Notes a problem. The path is quoted, because a file name could otherwise forge log lines."""
        reason = error.strerror if isinstance(error, OSError) else error
        self._problems.append(f"token_folder: {str(path)!r}: {reason}")


def check_token(token: str) -> None:
    """Raises ValueError if the token is too short or cannot be sent in a header. The message does not contain it."""
    if len(token) < MIN_CHARS:
        remedy = "openssl rand -hex 24 makes a good one"
        raise ValueError(f"a token has {len(token)} characters, at least {MIN_CHARS} are needed: {remedy}")
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(
            "a token has characters that no header can hold: only printable ASCII without spaces is allowed"
        )


def read_tokens(path: Path) -> list[str]:
    """The tokens in a file, one per line. Raises OSError or ValueError, whose messages contain no token."""
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
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
    """The tokens in a caller's file; none if it was removed after it was listed. Raises as `read_tokens`."""
    if not NAME.fullmatch(path.name):
        raise ValueError(f"not a caller's name; expected {NAME.pattern}")
    try:
        return read_tokens(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise
        return []


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
