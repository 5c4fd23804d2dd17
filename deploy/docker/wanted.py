"""`python wanted.py pyproject.toml EXTRA...` prints the project's requirements with these extras, one per line.

The images install dependencies before the code is copied, so that a code change does not reinstall torch.
"""

import sys
import tomllib
from pathlib import Path

file, *extras = sys.argv[1:]
project = tomllib.loads(Path(file).read_text())["project"]
wanted = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
itself = f"{project['name']}["
sys.stdout.write("".join(f"{line}\n" for line in wanted if not line.startswith(itself)))
