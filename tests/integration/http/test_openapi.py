"""The OpenAPI document of every service, and its page at /docs, which needs no network."""

from __future__ import annotations

import re
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
from tests.kit.wait import WITHIN_S

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
        assert "422" in statuses or all(each["in"] != "query" for each in operation.get("parameters", ())), call
        assert bool(operation["security"]) is not is_open, call
        for status, response in operation["responses"].items():
            for kind, content in response.get("content", {}).items():
                if kind == "application/problem+json" and status != "default":
                    assert content["example"]["status"] == int(status), call


def test_names_of_operations_are_plain_and_unique(document: Node) -> None:
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("name", "call", "options", "status"),
    [
        ("dvp-rollout", "POST /v1/rollouts", {"json": {"prompt": "1", "n": 0}}, 422),
        ("dvp-rollout", "POST /v1/jobs", {"json": {"prompt": "1", "n": 0}}, 422),
        ("dvp-rollout", "POST /v1/rollouts", {"content": b"x", "headers": JSON}, 400),
        ("dvp-rollout", "POST /v1/jobs", {"content": b"{}"}, 415),
        ("dvp-monitor", "GET /v1/dead", {"params": {"before": "x"}}, 422),
        ("dvp-monitor", "GET /v1/audit", {"params": {"count": 0}}, 422),
        ("dvp-monitor", "GET /v1/completions", {"params": {"step": -1}}, 422),
        ("dvp-monitor", "POST /v1/dead/drop", {"json": {"entry_ids": []}}, 422),
        ("dvp-monitor", "POST /v1/dead/replay", {"content": b"{}"}, 415),
        ("dvp-weights", "GET /v1/weights/qwen3-math/weights-000013/.hidden", {}, 422),
        ("dvp-weights", "GET /v1/weights/qwen3-math/weights-000013/model.safetensors", {}, 404),
    ],
)
def test_refusals_are_worded_as_in_the_document(name: str, call: str, options: Node, status: int) -> None:
    app = APPS[name](ApiTokens([TOKEN]))
    method, path = call.split()
    template = next(known for known in app.openapi()["paths"] if re.fullmatch(re.sub(r"{\w+}", "[^/]+", known), path))
    with serving(app) as url, httpx.Client(auth=("", TOKEN), trust_env=False, timeout=WITHIN_S) as client:
        answer = client.request(method, url + path, **options)
    assert answer.status_code == status
    assert answer.json() == _example(app.openapi(), template, method, status)


@pytest.mark.parametrize("name", APPS)
def test_refusals_of_callers_are_worded_as_in_the_document(tmp_path: Path, name: str) -> None:
    app = APPS[name](ApiTokens([], _tokens(tmp_path)))
    with serving(app) as url, httpx.Client(trust_env=False, timeout=WITHIN_S) as client:
        for call, operation in operations(app.openapi()):
            method, path = call.split()
            for needed in (scope for item in operation["security"] for scope in item["token"]):
                other = next(scope for scope in Scope if not scope.includes(Scope(needed)))
                token = (tmp_path / other / "alice").read_text().strip()
                for status, headers in ((401, {}), (403, {"Authorization": f"Bearer {token}"})):
                    answer = client.request(method, url + path, headers=headers)
                    assert answer.status_code == status
                    assert answer.json() == _example(app.openapi(), path, method, status)


def _tokens(folder: Path) -> Path:
    for scope in Scope:
        write_token(folder, scope, "alice")
    return folder


def _example(document: Node, path: str, method: str, status: int) -> Any:
    response = document["paths"][path][method.lower()]["responses"][str(status)]
    return response["content"]["application/problem+json"]["example"]


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("scope", Scope)
def test_what_a_service_does_not_have_is_told_to_every_caller(
    tmp_path: Path, scope: Scope, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a client of another server, or a typo, would hear that it needs a token of scope operate."""
    token = write_token(tmp_path, scope, "alice")
    caplog.set_level("INFO", "dvp_rl.operators")
    with serving(APPS[name](ApiTokens([], tmp_path))) as url:
        for path in ("/v1/chat/completions", "/v1/v1/rollouts", "//v1/jobs", "/v1/rollout", "/healthz/", "/metrics/"):
            answer = web.post(url + path, headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == 404, path
            assert answer.json()["detail"].startswith(f"POST {path}: Not Found; ")
            assert web.post(url + path).status_code == 401, path
        wrong = web.post(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
    logged = [record for record in caplog.records if record.name == "dvp_rl.operators"]
    assert bool(logged) is (scope is Scope.OPERATE), "only operators are logged as such"


def test_all_methods_of_a_path_are_named() -> None:
    with serving(APPS["dvp-rollout"](ApiTokens())) as url:
        for path, allowed in (("/v1/weights", "GET, POST"), ("/v1/jobs/a", "DELETE, GET"), ("/v1/rollouts", "POST")):
            answer = web.request("PUT", url + path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
            assert answer.json()["detail"] == f"PUT {path}: Method Not Allowed; allowed: {allowed}"


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
performance.getEntriesByType("resource").map((entry) => entry.name)
  .filter((name) => new URL(name).origin !== location.origin)
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
                # A browser that was given the password this way refuses to fetch relative addresses.
                _look(browser, f"{url}/docs".replace("//", f"//bob:{TOKEN}@"), 1400, False, num_operations)
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
