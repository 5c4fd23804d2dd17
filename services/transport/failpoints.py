"""Named points where a test can stop this process. Off, and free, unless DVP_FAILPOINTS is set."""

from __future__ import annotations


def failpoint(name: str) -> None:
    """Nothing, unless DVP_FAILPOINTS="name[:n]=kill|stop|raise,..." names this point: then its n-th pass (default 1)
    is SIGKILL, SIGSTOP or FailPointError."""
