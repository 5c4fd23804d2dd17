"""Tells whoever waits what for: no silence of more than a few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

logger = logging.getLogger(__name__)

SILENCE_S = 5.0
"""Time after which a wait is mentioned, in seconds; then whenever it has doubled."""
LONGEST_SILENCE_S = 60.0


@contextmanager
def patient(
    what: str | Callable[[], str], say: Callable[[str], object] = logger.info, *, usual_s: float = 0.0
) -> Iterator[None]:
    """Says that `what` still goes on while the block does. A function is asked each time, in another thread. What
    usually takes `usual_s` is first mentioned after twice that."""
    done = Event()

    def tell() -> None:
        began, pause_s = time.monotonic(), max(SILENCE_S, 2 * usual_s)
        while not done.wait(pause_s):
            passed = time.monotonic() - began
            say(f"{what if isinstance(what, str) else what()}, {passed:.0f} s so far")
            pause_s = min(passed, LONGEST_SILENCE_S)

    teller = Thread(target=tell, name=__name__, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
