"""httpx with the bound of every wait, and past any proxy: what a test asks is on loopback.

Certificates are read once: httpx reads them for every call.
"""

from __future__ import annotations

import ssl
from functools import partial

import httpx

from tests.kit.wait import WITHIN_S

OPTIONS = {"timeout": WITHIN_S, "trust_env": False, "verify": ssl.create_default_context()}

get = partial(httpx.get, **OPTIONS)
post = partial(httpx.post, **OPTIONS)
delete = partial(httpx.delete, **OPTIONS)
request = partial(httpx.request, **OPTIONS)
stream = partial(httpx.stream, **OPTIONS)
