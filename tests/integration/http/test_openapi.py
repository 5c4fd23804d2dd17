"""The OpenAPI document of every service, and its page at /docs, which needs no network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from dvp_rl.http.api_tokens import ApiTokens, Scope
from dvp_rl.http.guard import OPEN_PATHS
from tests.integration.http.served import APPS, serving
from tests.kit import web
from tests.kit.browser import Browser, chromium, running
from tests.kit.tokens import TOKEN, write_token

Node = dict[str, Any]


@pytest.fixture(params=APPS)
def document(request: pytest.FixtureRequest) -> Node:
    with serving(APPS[request.param](ApiTokens())) as url:
        found: Node = web.get(f"{url}/openapi.json").json()
    return found


def operations(document: Node) -> Iterator[tuple[str, Node]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def contents(operation: Node) -> Iterator[tuple[str, Node]]:
    """(media type, content) of everything that the operation takes or returns, but undescribed refusals."""
    bodies = {**operation["responses"], "body": operation.get("requestBody", {})}
    for body in (body for key, body in bodies.items() if key != "default"):
        yield from body.get("content", {}).items()


def test_everything_is_described(document: Node) -> None:
    assert len(document["info"]["description"]) > 20
    for call, operation in operations(document):
        assert operation["summary"], call
        for parameter in operation.get("parameters", ()):
            assert parameter["description"], (call, parameter["name"])
        for status, response in operation["responses"].items():
            assert response["description"], (call, status)
    for name, schema in document["components"]["schemas"].items():
        assert schema["description"], name
        for field, node in schema.get("properties", {}).items():
            assert node.get("description"), f"{name}.{field}"


def test_everything_in_json_has_an_example_that_fits_its_schema(document: Node) -> None:
    schemas = {"components": document["components"]}
    for call, operation in operations(document):
        for kind, content in contents(operation):
            if not kind.endswith("json"):
                continue
            examples = [example["value"] for example in content.get("examples", {}).values()]
            examples += [content["example"]] if "example" in content else []
            name = content["schema"]["$ref"].rpartition("/")[2]
            examples += document["components"]["schemas"][name].get("examples", ())
            assert examples, (call, kind, name)
            for example in examples:
                Draft202012Validator({**content["schema"], **schemas}).validate(example)


def test_refusals_that_a_caller_must_expect_are_listed(document: Node) -> None:
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for call, operation in operations(document):
        statuses = set(operation["responses"])
        is_open = call.split()[1] in OPEN_PATHS
        assert {"403", "default"} <= statuses, call
        assert ({"401", "429"} <= statuses) is not is_open, call
        assert ({"400", "415", "422"} <= statuses) is ("requestBody" in operation), call
        assert bool(operation["security"]) is not is_open, call
        for status, response in operation["responses"].items():
            for kind, content in response.get("content", {}).items():
                if kind == "application/problem+json" and status != "default":
                    assert content["example"]["status"] == int(status), call


def test_names_of_operations_are_plain_and_unique(document: Node) -> None:
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/v1/models"])
@pytest.mark.parametrize("scope", [Scope.READ, Scope.ROLLOUT])
def test_a_client_of_another_server_is_told_whatever_its_scope(tmp_path: Path, scope: Scope, path: str) -> None:
    """Without the hint's own scope, it would hear that it needs a token of scope operate."""
    token = write_token(tmp_path, scope, "alice")
    with serving(APPS["dvp-rollout"](ApiTokens([], tmp_path))) as url:
        answer = web.post(url + path, json={}, headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 404
        assert "/v1/" in answer.json()["detail"].partition(";")[2]
        assert web.post(url + path, json={}).status_code == 401


@pytest.mark.parametrize("name", APPS)
def test_the_page_loads_nothing_from_elsewhere(name: str) -> None:
    with serving(APPS[name](ApiTokens([TOKEN]))) as url, httpx.Client(auth=("", TOKEN), trust_env=False) as client:
        page = client.get(f"{url}/docs")
        assert page.status_code == 200
        assert "http" not in page.text
        for file in ("swagger-ui.css", "swagger-ui-bundle.js", "docs.css", "docs.js"):
            answer = client.get(f"{url}/docs/{file}")
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        missing = client.get(f"{url}/docs/nothing.js")
        assert missing.status_code == 404
        assert "swagger-ui.css" in missing.json()["detail"]
        refused = web.get(f"{url}/docs")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic "), "a browser asks its user for the token"


FROM_ELSEWHERE = """
performance.getEntriesByType("resource").map((entry) => entry.name).filter((name) => !name.startsWith(location.origin))
"""
TRY = """
(async () => {
  const block = document.querySelector("[id$=-healthz]");
  const press = async (selector) => {
    while (!block.querySelector(selector)) await new Promise((done) => setTimeout(done, 20));
    block.querySelector(selector).click();
  };
  await press(".opblock-summary-control");
  await press(".try-out__btn");
  await press(".execute");
})()
"""


@pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine (apt-get install chromium)")
def test_the_page_shows_and_tries_every_service_in_a_browser(tmp_path: Path) -> None:
    with running(tmp_path) as browser:
        for make in APPS.values():
            app = make(ApiTokens())
            num_operations = len([*operations(app.openapi())])
            with serving(app) as url:
                for width, dark in ((1400, False), (1400, True), (390, False), (390, True)):
                    _look(browser, f"{url}/docs", width, dark, num_operations)
                assert browser.evaluate("document.title") == app.title
                browser.evaluate(TRY)
                browser.until("document.querySelector('.live-responses-table .microlight')?.textContent.includes('ok')")
    assert browser.problems == []


def _look(browser: Browser, url: str, width: int, dark: bool, num_operations: int) -> None:
    browser.open(url, width=width, dark=dark)
    browser.until(f"document.querySelectorAll('.opblock').length === {num_operations}")
    assert browser.evaluate(FROM_ELSEWHERE) == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.documentElement.classList.contains('dark-mode')") is dark
