"""`python wanted.py pyproject.toml EXTRA...` prints the project's requirements with these extras, one per line.

The images install dependencies before the code is copied, so that a code change does not reinstall torch.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

file, *extras = sys.argv[1:]
project = tomllib.loads(Path(file).read_text())["project"]


def requirements(extra: str) -> Iterator[str]:
    """The requirements of an extra, and of the project's extras among them."""
    for line in project["optional-dependencies"][extra]:
        if itself := re.fullmatch(rf"{project['name']}\[(.*)\]", line):
            for inner in itself[1].split(","):
                yield from requirements(inner)
        else:
            yield line


wanted = [*project["dependencies"], *(line for extra in extras for line in requirements(extra))]
sys.stdout.write("".join(f"{line}\n" for line in dict.fromkeys(wanted)))
