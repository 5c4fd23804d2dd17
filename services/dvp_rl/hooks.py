"""Extension points: settings that name a user's own function as `module:function`. trainer/HOOKS.md lists them."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

from dvp_rl.contract.errors import ConfigError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
NAME = re.compile(r"[^\s:/]+:[^\W\d]\w*")
"""A module may be a file whose name is no identifier."""


def is_hook(name: str) -> bool:
    """True if the text has the form `module:function`."""
    return NAME.fullmatch(name) is not None


def hook_name(name: str) -> str:
    """The name itself. Raises ValueError if it does not have the form `module:function`."""
    if not is_hook(name):
        raise ValueError("expected module:function")
    return name


def choice_or_hook(choices: type[StrEnum], name: str) -> str:
    """The member of `choices` of this value, or a hook's name. Raises ValueError for anything else."""
    if name in list(choices):
        return choices(name)
    if not is_hook(name):
        raise ValueError(f"allowed are {', '.join(choices)}, or your own as module:function")
    return name


def load_hook(setting: str, name: str) -> Callable[..., Any]:
    """Imports `module:function`, with the working directory at the END of the import path.

    `setting` is the setting that holds `name`. Raises ConfigError that says what is wrong; the log has the traceback of
    a module that fails.
    """
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        if not (isinstance(error, ModuleNotFoundError) and error.name == module_name):
            logger.exception("%s %r cannot be imported", setting, name)
        raise ConfigError(f"{setting} {name!r}: importing {module_name} failed ({describe_error(error)})") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{setting} {name!r}: {module_name} has no function {function_name!r}")
    loaded: Callable[..., Any] = function
    return loaded


def call_hook(setting: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The hook's result. Raises ConfigError if the hook is a coroutine or raises anything, which the log then shows."""
    try:
        result = function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        logger.exception("%s failed", setting)
        raise ConfigError(f"{setting}: your function failed ({describe_error(error)})") from error
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigError(f"{setting}: your function is a coroutine (async def), which nothing would run")
    return result


def check_members(setting: str, result: object, *, attributes: Iterable[str] = (), methods: Iterable[str] = ()) -> None:
    """Raises ConfigError if a hook's result lacks one of these."""
    lacking = [name for name in attributes if not hasattr(result, name)]
    lacking += [name for name in methods if not callable(getattr(result, name, None))]
    if lacking:
        found = describe_type(result)
        raise ConfigError(f"{setting}: your function returned {found} without {', '.join(sorted(lacking))}")


def as_number(value: Any) -> float:
    """A hook's result as a float. Raises TypeError or ValueError if it is not one finite number."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"returned a {type(value).__name__}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, expected a finite number")
    return number


def describe_type(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def describe_error(error: BaseException) -> str:
    """Type and first line, cut short."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the exception's class is a user's
        text = "(it has no text)"
    return readable(f"{type(error).__name__}: {text.partition(chr(10))[0]:.200}")


def readable(text: str) -> str:
    """The text with lone surrogates, which nothing can encode, written as escapes."""
    return text.encode(errors="backslashreplace").decode()
