"""How a shell starts the programs of this installation."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from shlex import quote


def program(name: str, *, here: bool = True) -> str:
    """The program by its name if a shell finds it, otherwise by its path, as `in_shell` gives it."""
    own, found = Path(sys.executable).with_name(name), shutil.which(name)
    if not own.exists() or (found is not None and own.samefile(found)):
        return name
    return in_shell(own, here=here)


def in_shell(path: Path, *, here: bool = True) -> str:
    """The path as a shell takes it: relative if it lies in the working directory, and the shell is `here`."""
    absolute, folder = Path(os.path.abspath(path)), Path.cwd()
    if not here or not absolute.is_relative_to(folder):
        return quote(str(absolute))
    relative = str(absolute.relative_to(folder))
    # One that looks like an option or a command must not be taken for it.
    return quote(relative if "/" in relative and relative[0] != "-" else f"./{relative}")
