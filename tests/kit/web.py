"""httpx with the timeout of every wait and without proxies, because tests talk to loopback only.

Certificates are loaded once, because httpx would load them for every call.
"""

from __future__ import annotations

import ssl
from functools import partial

import httpx

from dvp_rl.contract.http import Problem
from tests.kit.wait import WITHIN_S

OPTIONS = {"timeout": WITHIN_S, "trust_env": False, "verify": ssl.create_default_context()}

get = partial(httpx.get, **OPTIONS)
post = partial(httpx.post, **OPTIONS)
delete = partial(httpx.delete, **OPTIONS)
request = partial(httpx.request, **OPTIONS)
stream = partial(httpx.stream, **OPTIONS)


def problem(response: httpx.Response, status: int) -> Problem:
    """The problem document of a refusal with this status."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = Problem.model_validate_json(response.content)
    assert document.status == status
    assert document.title
    assert document.detail
    return document
