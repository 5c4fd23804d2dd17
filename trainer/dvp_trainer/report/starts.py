"""What every start of a run was made from: settings, model, code and software.

out_dir/starts.jsonl has a line per start, out_dir/settings.toml the settings of the newest one; `dvp-train OUT_DIR`
starts with them again. Secrets are masked in both.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.record import describe
from dvp_rl.cpus import usable_cpus
from dvp_rl.settings import Settings
from dvp_trainer.disk import AppendedFile

FILE, SETTINGS = "starts.jsonl", "settings.toml"
SOFTWARE = ("dvp-rl", "torch", "transformers", "tokenizers", "safetensors", "peft", "datasets", "numpy", "redis")
GIT_TIMEOUT_S = 5.0
ABSENT = "–"
MAX_STARTS = 100
"""Starts kept in the file: the newest."""


class Start(BaseModel):
    """One start of a run. Unknown fields are ignored: a later version may have written them."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    at: str
    """UTC, ISO 8601."""
    step: int
    """Batches trained before it."""
    settings: dict[str, Any]
    """As `Settings.to_json` gives them."""
    model: str
    """Digest of the folder model.path."""
    chat_template: str | None = None
    """Text of the file data.chat_template."""
    roles: tuple[str, ...] | None = None
    """Roles of the first prompt's messages, () if it is plain text; None if an earlier version wrote this."""
    up: bool = False
    """Whether `dvp-train up` started a broker and replicas for it."""
    folder: str
    """Working directory: relative paths in `settings` start there."""
    code: dict[str, str]
    """Git commits of the working directory and of this project, by folder; `-dirty` if tracked files were changed."""
    software: dict[str, str]
    """Versions of Python and of the packages that decide what is computed."""
    machine: dict[str, str]

    @property
    def run_id(self) -> str:
        return str(self.settings["run_id"])

    def config(self) -> dict[str, Any]:
        """Settings and origin in one dictionary, for trackers of experiments."""
        return {**self.settings, "start": self.model_dump(exclude={"settings"})}


def describe_start(
    settings: Settings,
    *,
    step: int,
    model: str,
    machine: Mapping[str, str],
    chat_template: str | None = None,
    roles: tuple[str, ...] | None = None,
    up: bool = False,
) -> Start:
    """A start with `settings` now. `model` is the digest of the model folder, `machine` adds to what is known of it."""
    here = Path.cwd()
    return Start(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        step=step,
        settings=settings.to_json(),
        model=model,
        chat_template=chat_template,
        roles=roles,
        up=up,
        folder=str(here),
        code=dict(_commits(here, Path(__file__).parent)),
        software={"python": platform.python_version(), **dict(_versions())},
        machine={"system": platform.platform(), "cpus": str(usable_cpus()), **machine},
    )


def write_start(start: Start, settings: Settings, out_dir: Path) -> None:
    """Adds the start to those of the run. Raises ConfigError (disk full, damaged file)."""
    earlier = read_starts(out_dir)[-MAX_STARTS + 1 :]
    _replace(out_dir / FILE, "".join(f"{each.model_dump_json()}\n" for each in (*earlier, start)))
    _replace(
        out_dir / SETTINGS, f"# Settings of {start.run_id} when it was started at {start.at}.\n{settings.to_toml()}"
    )


def read_starts(out_dir: Path) -> list[Start]:
    """The starts of the run, oldest first; none if there is no file. Raises ConfigError naming a damaged line."""
    path = out_dir / FILE
    starts = []
    lines = (
        path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    )  # splitlines() splits inside JSON
    for number, line in enumerate(lines, start=1):
        try:
            starts.append(Start.model_validate_json(line))
        except ValidationError as error:
            raise ConfigError(f"{describe(f'{path}: line {number}', error)}; repair or move the file") from None
    return starts


def last_start(out_dir: Path) -> Start:
    """The newest start. Raises ConfigError if there is none."""
    return starts_of_run(out_dir)[-1]


def starts_of_run(out_dir: Path) -> list[Start]:
    """The starts of the run, oldest first. Raises ConfigError if there is none."""
    starts = read_starts(out_dir)
    if not starts:
        raise ConfigError(f"{out_dir} is not the out_dir of a run: it has no {FILE}")
    return starts


def that_trained(starts: Sequence[Start], step: int) -> list[Start]:
    """Those of `starts` that trained the first `step` batches; for step 0, the newest that began there. A start
    replaces what earlier ones had trained beyond its own step."""
    trained: list[Start] = []
    for start in reversed(starts):
        if start.step < (trained[0].step if trained else max(step, 1)):
            trained.insert(0, start)
    return trained or list(starts[-1:])


def over_time(starts: Sequence[Start], read: Callable[[Start], Iterable[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    """What `read` tells of the starts, by name. A value that changed is followed by the step of the change and the new
    one."""
    told = [dict(read(start)) for start in starts]
    for name in dict.fromkeys(name for each in told for name in each):
        values = [each.get(name, ABSENT) for each in told]
        changes = [
            f", from step {start.step} {value}"
            for start, value, before in zip(starts[1:], values[1:], values, strict=False)
            if value != before
        ]
        yield name, values[0] + "".join(changes)


def changes(before: Start, now: Start) -> dict[str, str]:
    """The settings in which `now` differs, in words, by name."""
    old, new = dict(flat(before.settings)), dict(flat(now.settings))
    return {
        name: f"{name} = {as_text(new.get(name))} (was {as_text(old.get(name))})"
        for name in dict.fromkeys([*new, *old])
        if new.get(name) != old.get(name)
    }


def as_text(value: Any) -> str:
    """The value of a setting as text."""
    return ABSENT if value is None else value if isinstance(value, str) else json.dumps(value)


def flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with its dotted name."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _replace(path: Path, text: str) -> None:
    file = AppendedFile(path)
    file.replace([text.encode()])
    file.close()


def _commits(*folders: Path) -> Iterator[tuple[str, str]]:
    """The repositories that the folders are in, each with its commit. Folders outside a repository, or of a repository
    that git does not answer for, are left out."""
    for folder in folders:
        root = _git(folder, "rev-parse", "--show-toplevel")
        if root and (commit := _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")):
            yield root, commit


def _git(folder: Path, *command: str) -> str:
    """What git prints; "" if it is missing, fails or takes too long."""
    try:
        ended = subprocess.run(
            ["git", *command],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return ended.stdout.strip()


def _versions() -> Iterator[tuple[str, str]]:
    for name in SOFTWARE:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
