"""httpx with the bound of every wait, and past any proxy: what a test asks is on loopback."""

from __future__ import annotations

from functools import partial

import httpx

from tests.kit.wait import WITHIN_S

get = partial(httpx.get, timeout=WITHIN_S, trust_env=False)
post = partial(httpx.post, timeout=WITHIN_S, trust_env=False)
delete = partial(httpx.delete, timeout=WITHIN_S, trust_env=False)
request = partial(httpx.request, timeout=WITHIN_S, trust_env=False)
stream = partial(httpx.stream, timeout=WITHIN_S, trust_env=False)
