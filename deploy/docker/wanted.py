"""`python wanted.py pyproject.toml EXTRA...`: what the project needs with these extras, one requirement per line.

The images install dependencies before the code is there, so that a change of code does not install torch again.
"""

import sys
import tomllib
from pathlib import Path

file, *extras = sys.argv[1:]
project = tomllib.loads(Path(file).read_text())["project"]
wanted = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
itself = f"{project['name']}["
sys.stdout.write("".join(f"{line}\n" for line in wanted if not line.startswith(itself)))
