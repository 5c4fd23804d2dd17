"""Base classes of every command's settings.

    command line (--redis-url)  >  environment (DVP_<APP>__REDIS_URL)  >  TOML file (redis_url)  >  defaults

Sections nest in all three: `--queue.url`, `DVP_TRAIN__QUEUE__URL`, `[queue] url`. Unknown keys are errors at every
level. Settings are built once, in a `__main__`, and passed down:

    class RolloutSettings(Settings):
        model_config = SettingsConfigDict(env_prefix="DVP_ROLLOUT__", cli_prog_name="dvp-rollout")
        port: int = 8000
        '''Shown by --help.'''

    with user_errors("dvp-rollout"):
        settings = RolloutSettings.load(sys.argv[1:])
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import re
import signal
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from dvp_rl.contract.errors import ConfigError, DvpError, is_refusal, reason

from .extras import NAME, version

NESTED = "__"
MASK = "**********"
"""Stands for a secret, as in pydantic."""
UNSET = "None"
"""Stands for None in a TOML file, as on the command line, where leaving a key out means something else."""
PAGE_WIDTH = 78
"""Columns of --help that pydantic-settings does not wrap by itself."""
SWITCH = {"True": "on", "False": "off"}
MASKED_IN_URL = re.compile(rf"[:=]{re.escape(MASK)}")
PASSWORDS = (
    re.compile(r"(:/+[^:@]*:).*(?=@)", re.DOTALL),
    re.compile(r"([^/:@\s'\"]+:)[^/@\s]+(?=@)"),
    re.compile(r"([?&]\w*(?:pass|token|secret|api_?key)\w*=)[^&\s]*", re.IGNORECASE),
)
"""Passwords in URLs, also malformed ones and those without a scheme: the part between user and host, and query
parameters that are named like secrets."""


class Section(BaseModel):
    """A nested group of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Settings(BaseSettings):
    """Settings of one command. Subclasses set `env_prefix` and `cli_prog_name`, and document fields in docstrings."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        env_nested_delimiter=NESTED,
        env_ignore_empty=True,
        nested_model_default_partial_update=True,
        cli_kebab_case=True,
        cli_implicit_flags="dual",
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
    )

    usage: ClassVar[str] = "[options]"
    """What --help shows after the program's name."""
    hint: ClassVar[str] = ""
    """What to do if no settings are given although some are required."""
    prose: ClassVar[frozenset[str]] = frozenset()
    """Settings, with dots, whose text is nobody's secret, whatever it looks like."""

    config: Path | None = None
    """TOML file with any of these settings."""
    dry_run: bool = False
    """Print the resolved settings, with secrets masked, and exit."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Sources by precedence; pydantic-settings puts the command line first. `init_settings` is the TOML file."""
        return env_settings, init_settings

    @classmethod
    def load(cls, argv: Sequence[str], toml_file: Path | None = None) -> Self:
        """Reads all sources. `--dry-run`, `--help` and `--version` print and exit with code 0. Raises ConfigError."""
        _refuse_unknown_variables(cls)
        file = toml_file or _config_option(cls, argv)
        values = _read_toml(cls, file)
        try:
            command_line = CliSettingsSource[Any](
                cls, add_argument_method=_add_argument, add_argument_group_method=_add_group
            )
            _complete(command_line.root_parser, cls)
            settings = cls(_cli_settings_source=command_line(args=list(argv)), **values)
        except SettingsError as error:
            raise ConfigError(_explain_flag(cls, str(error))) from None
        except ValidationError as error:
            given_nothing = not argv and file is None and all(item["type"] == "missing" for item in error.errors())
            raise ConfigError(cls.hint if given_nothing and cls.hint else _explain(cls, error)) from None
        if settings.dry_run:
            sys.stdout.write(settings.to_toml())
            raise SystemExit(0)
        _refuse_masks(cls, settings.model_dump(exclude={"config", "dry_run"}))
        return settings

    def to_toml(self) -> str:
        """The resolved settings as a TOML file. Secrets are masked in it; once they are given in the environment or on
        the command line, `load` reads it back."""
        return _to_toml(self.to_json(), type(self))

    def to_json(self) -> dict[str, Any]:
        """The resolved settings as plain values, with secrets masked."""
        shown: dict[str, Any] = _masked(self.model_dump(mode="json", exclude={"config", "dry_run"}), self.prose)
        return shown


def forget_variables() -> None:
    """Removes all DVP_... environment variables. Commands that bring their own settings call it, so that what a shell
    exports for a service reaches neither them nor the processes they start."""
    for name in [name for name in os.environ if name.upper().startswith("DVP_")]:
        del os.environ[name]


@contextmanager
def user_errors(program: str) -> Iterator[None]:
    """Turns this project's errors and refusals by the operating system into one message on stderr and exit code 2, and
    Ctrl-C into exit code 130. If nobody reads its output any more (`| head`), the program ends silently."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (DvpError, OSError) as error:
        if isinstance(error, OSError) and not is_refusal(error):
            raise
        sys.stderr.write(f"{program}: error: {error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


class _Switch(argparse.BooleanOptionalAction):
    """Takes --name and --no-name."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, not str(option).startswith("--no-"))


def _add_argument(parser: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
    """Shows in --help what a user would type: StrEnum members by value, types by everyday names, no empty defaults."""
    metavar, text = str(options.get("metavar", "")), str(options.get("help", ""))
    text = re.sub(r" ?\(default factory: \w+\)$", "", text)
    text = re.sub(r" ?\(default: \)$", "" if metavar == SecretStr.__name__ else r" (default: empty)", text)
    if metavar:
        options["metavar"] = _everyday(metavar)
    if metavar.startswith("{") and not text.endswith("(default: None)"):
        text = re.sub(r"\(default: .*\)$", lambda default: default[0].lower(), text)
    if options.get("action") is not argparse.BooleanOptionalAction:
        return parser.add_argument(*names, **options | {"help": text})
    is_off = text.endswith("(default: False)")
    action = parser.add_argument(*names, **options | {"help": text, "action": _Switch})
    if is_off:  # the other form is accepted, but would only lengthen the page
        action.option_strings = names
    action.help = re.sub(r"\(default: (\w+)\)$", lambda found: f"(default: {SWITCH[found[1]]})", text)
    return action


def _everyday(metavar: str) -> str:
    """The Python type that pydantic-settings shows, as something that can be typed."""
    words = {"str": "TEXT", "SecretStr": "SECRET", "int": "N", "float": "X", "Path": "PATH"}
    if metavar.startswith("dict["):
        return "NAME=VALUE"
    if metavar.startswith("{"):
        choices = (words.get(choice, choice.lower()) for choice in re.findall(r"[^{},]+", metavar))
        return f"{{{','.join(choices)}}}"
    plain = re.sub(r"\w+", lambda word: words.get(word[0], word[0]), metavar)
    return re.sub(r"^tuple\[(.*)\]$", r"\1", plain)


def _add_group(parser: argparse.ArgumentParser, **options: Any) -> Any:
    if description := options.get("description"):
        options["description"] = textwrap.fill(inspect.cleandoc(description), PAGE_WIDTH)
    return parser.add_argument_group(**options)


def _complete(parser: argparse.ArgumentParser, cls: type[Settings]) -> None:
    """Adds to a command's parser what pydantic-settings leaves out."""
    prefix = cls.model_config["env_prefix"]
    parser.usage = f"%(prog)s {cls.usage}"
    parser.description = textwrap.fill(inspect.cleandoc(cls.__doc__ or ""), PAGE_WIDTH)
    parser.add_argument("--version", action="version", version=f"{NAME} {version()}", help="show the version and exit")
    parser.epilog = (
        f"Each option is also a key of the TOML file and a variable of the environment:\n--section.key-name is "
        f"key_name in [section], and {prefix}SECTION__KEY_NAME.\nThe command line wins over the environment, and "
        "the environment over the file."
    )


def _config_option(cls: type[Settings], argv: Sequence[str]) -> Path | None:
    """The TOML file named by --config or the environment; it must be known before the sources are merged."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", default=os.environ.get(f"{cls.model_config['env_prefix']}CONFIG") or None)
    try:
        config = parser.parse_known_args(list(argv))[0].config
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    return Path(config) if config else None


def _read_toml(cls: type[Settings], file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {file}: not TOML: {error}") from None
    for key in values:
        if key not in cls.model_fields:
            raise ConfigError(f"configuration file {file}: unknown key {key!r}{_closest(key, cls.model_fields)}")
    return _without_unset(cls, values)


def _without_unset(model: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    """The values with None for UNSET, where that is what it stands for."""
    read: dict[str, Any] = {}
    for name, value in values.items():
        section = _section_of(model, name)
        if section is not None and isinstance(value, dict):
            read[name] = _without_unset(section, value)
        else:
            read[name] = None if value == UNSET and _needs_unset(model, name) else value
    return read


def _needs_unset(model: type[BaseModel] | None, name: str) -> bool:
    """Whether the field may be None, but is not if it is left out."""
    if model is None or name not in model.model_fields:
        return False
    field = model.model_fields[name]
    return type(None) in get_args(field.annotation) and field.default is not None


def _section_of(model: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    return _section(model.model_fields[name]) if model is not None and name in model.model_fields else None


def _refuse_unknown_variables(cls: type[Settings]) -> None:
    prefix = cls.model_config["env_prefix"].rstrip("_") + "_"
    known = [cls.model_config["env_prefix"] + name for name in _variables(cls)]
    for name in os.environ:
        # No model lists the keys of a free-form dictionary.
        inside = any(name.upper().startswith(root[:-1]) for root in known if root.endswith("*"))
        if name.upper().startswith(prefix) and name.upper() not in known and not inside:
            names = [root for root in known if not root.endswith("*")]
            raise ConfigError(f"unknown environment variable {name}{_closest(name.upper(), names)}")


def _refuse_masks(cls: type[Settings], values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value in which `to_toml` masked a secret."""
    for path, value in _leaves(values):
        is_prose = any(".".join(path[:length]) in cls.prose for length in range(1, len(path) + 1))
        in_url = not is_prose and isinstance(value, str) and MASKED_IN_URL.search(value)
        if in_url or (isinstance(value, SecretStr) and value.get_secret_value() == MASK):
            raise ConfigError(_masked_before(cls, path))


def _masked_before(cls: type[Settings], path: Sequence[str]) -> str:
    return f"{'.'.join(path)}: its secret was masked when these settings were written; give it as {_ways(cls, path)}"


def _ways(cls: type[Settings], path: Sequence[str]) -> str:
    """How a setting can be given, other than in a file."""
    return f"--{'.'.join(path).replace('_', '-')} or {cls.model_config['env_prefix']}{NESTED.join(path).upper()}"


def _leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value inside nested dictionaries and lists, with the keys that lead to it."""
    if isinstance(values, Mapping):
        for key, inner in values.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(values, (list, tuple)):
        for inner in values:
            yield from _leaves(inner, path)
    else:
        yield path, values


def _variables(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name.upper()
        section = _section(field)
        if section is not None:
            yield from (f"{name.upper()}{NESTED}{inner}" for inner in _variables(section))
        elif "dict" in str(field.annotation):
            yield f"{name.upper()}{NESTED}*"


def _section(field: FieldInfo) -> type[BaseModel] | None:
    candidates = [field.annotation, *get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _closest(name: str, known: Any) -> str:
    """A hint for an unknown name: `; did you mean a or b?`, or all known names if none is close."""
    known = list(known)
    near = get_close_matches(name, known, n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(known)}"


def _explain_flag(cls: type[Settings], message: str) -> str:
    message = message.removeprefix("error parsing CLI: ")
    if table := re.match(r"Parsing error encountered for ([\w.]+): not enough values", message):
        return f"{table[1]}: expected NAME=VALUE or a JSON object"
    if field := re.match(r'error parsing value for field "(\w+)" from source "EnvSettingsSource"', message):
        start = f"{cls.model_config['env_prefix']}{field[1]}".upper()
        named = sorted(name for name in os.environ if name.upper().startswith(start))
        return f"{' or '.join(named)}: not JSON, which lists and dictionaries must be in the environment"
    unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
    if unknown is None:
        return masked(message)
    flags = ["--" + name.lower().replace(NESTED, ".").replace("_", "-") for name in _variables(cls)]
    return f"unknown option {unknown[1]}{_closest(unknown[1], flags)}"


def _explain(cls: type[Settings], error: ValidationError) -> str:
    """One line per invalid setting: its name, what is allowed, and the value (never a secret)."""
    lines = []
    for item in error.errors(include_url=False, include_context=False):
        path = [str(part) for part in item["loc"]]
        name = ".".join(path) or "settings"
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {name}{_closest(path[-1], _siblings(cls, path))}")
        elif item["type"] == "missing":
            lines.append(f"{name} is required: {_ways(cls, path)}")
        elif path and _is_secret(cls, path) and MASK in str(item["input"]):
            lines.append(_masked_before(cls, path))
        else:
            message = reason(item)
            shown = path and not _is_secret(cls, path)
            text = masked(repr(item["input"]))
            if path and path[-1].endswith("url"):  # may be too malformed to find its password
                text = re.sub(r"^'(\w+://)?.*@", rf"'\1{MASK}@", text)
            lines.append(f"{name}: {message}" + (f", got {text:.120}" if shown else ""))
    return "\n".join(lines)


def _is_secret(model: type[BaseModel], path: Sequence[str]) -> bool:
    """True if `path` leads to a secret, or to a section that contains one."""
    for part in path:
        field = model.model_fields.get(part)
        if field is None:
            return False
        section = _section(field)
        if section is None:
            return SecretStr.__name__ in str(field.annotation)
        model = section
    return any(_is_secret(model, [name]) for name in model.model_fields)


def _siblings(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    for part in path[:-1]:
        field = model.model_fields.get(part)
        model = (field and _section(field)) or model
    return list(model.model_fields)


def _masked(value: Any, prose: frozenset[str], path: str = "") -> Any:
    """Masks passwords inside URLs. Secrets have masked themselves already."""
    if path in prose:
        return value
    if isinstance(value, dict):
        return {key: _masked(inner, prose, f"{path}.{key}" if path else key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner, prose, path) for inner in value]
    return masked(value) if isinstance(value, str) and "://" in value else value


def masked(text: str) -> str:
    """The text with the passwords of URLs masked."""
    for password in PASSWORDS:
        text = password.sub(rf"\1{MASK}", text)
    return text


def _to_toml(table: dict[str, Any], model: type[BaseModel] | None, path: str = "") -> str:
    """`model`: the settings or section that the table shows; None for a free-form dictionary."""
    text = ""
    for key, value in table.items():
        if value is None and not _needs_unset(model, key):
            text += f"# {key} is not set\n"
        elif not isinstance(value, dict):
            text += f"{_key(key)} = {_literal(UNSET if value is None else value)}\n"
    for key, inner in table.items():
        if isinstance(inner, dict):
            name = f"{path}{_key(key)}"
            text += f"\n[{name}]\n{_to_toml(inner, _section_of(model, key), f'{name}.')}"
    return text


def _literal(value: Any) -> str:
    """The value as TOML, which writes strings, numbers, booleans and arrays as JSON does, but not objects, nor numbers
    that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_literal(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(inner) for inner in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _literal(name)
