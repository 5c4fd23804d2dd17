"""The tables of services/http/README.md are what a test found; `DVP_TEST_WRITE_TABLES=1` writes them there."""

from __future__ import annotations

import os
from pathlib import Path

README = Path(__file__).parents[3] / "services" / "http" / "README.md"
WRITE = "DVP_TEST_WRITE_TABLES"


def check_table(name: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)]
    before, start, rest = README.read_text().partition(f"<!-- {name} -->\n")
    written, end, after = rest.partition(f"<!-- end of {name} -->")
    assert start, f"no table of {name} in {README}"
    assert end, f"no end of the table of {name} in {README}"
    found = "\n".join(lines) + "\n"
    if os.environ.get(WRITE):
        README.write_text(before + start + found + end + after)
    else:
        assert written == found, f"run this with {WRITE}=1"
