"""Tables in documents must equal what a test measured; `DVP_TEST_WRITE_TABLES=1` updates them."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
WRITE = "DVP_TEST_WRITE_TABLES"


def check_table(
    name: str, head: tuple[str, ...], rows: list[tuple[str, ...]], document: str = "services/dvp_rl/http/README.md"
) -> None:
    readme = REPOSITORY / document
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)]
    before, start, rest = readme.read_text().partition(f"<!-- {name} -->\n")
    written, end, after = rest.partition(f"<!-- end of {name} -->")
    assert start, f"no table of {name} in {document}"
    assert end, f"no end of the table of {name} in {document}"
    found = "\n".join(lines) + "\n"
    if os.environ.get(WRITE):
        readme.write_text(before + start + found + end + after)
    else:
        assert written == found, f"run this with {WRITE}=1"
