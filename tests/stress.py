"""Runs the tests while every core and the memory are busy: a test that merely waits for a fixed time fails here.

python -m tests.stress              all groups of tests.verdict
python -m tests.stress fast         some of them
"""

from __future__ import annotations

import multiprocessing
import os

from tests import verdict

WALKED_BYTES = 512 << 20
"""Bytes that each burner walks over: more than any cache holds."""
PAGE_BYTES = 4096


def burn() -> None:
    """Keeps one core and its memory busy for as long as the tests run."""
    memory, parent = bytearray(WALKED_BYTES), os.getppid()
    while os.getppid() == parent:
        for page in range(0, WALKED_BYTES, PAGE_BYTES):
            memory[page] ^= 1


def main() -> None:
    for _ in range(os.cpu_count() or 1):
        multiprocessing.Process(target=burn, daemon=True).start()
    verdict.main()


if __name__ == "__main__":
    main()
