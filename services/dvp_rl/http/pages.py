"""Files for browsers: the page at /docs, and how every page of this project is sent."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Response

from dvp_rl.contract.errors import NotFoundError

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
KEPT = {"Cache-Control": "max-age=3600"}
"""For megabytes that only change with an update."""
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PAGE = files(__package__) / "page"
SWAGGER = files("fastapi_offline") / "static"
"""Swagger UI, which FastAPI would load from the internet."""
FILES = {
    "docs.css": PAGE,
    "docs.js": PAGE,
    "swagger-ui.css": SWAGGER,
    "swagger-ui-bundle.js": SWAGGER,
}
"""What the page at /docs loads, and where it lies."""

router = APIRouter(include_in_schema=False)


def page_file(folder: Traversable, name: str, headers: Mapping[str, str] = HEADERS) -> Response:
    media_type = TYPES[name.rpartition(".")[2]]
    return Response((folder / name).read_bytes(), media_type=media_type, headers=headers)


@router.get("/docs")
async def docs() -> Response:
    return page_file(PAGE, "docs.html")


@router.get("/docs/{name}")
async def docs_file(name: str) -> Response:
    if name not in FILES:
        raise NotFoundError(f"/docs/{name}: no such file; the page at /docs needs {', '.join(FILES)}")
    return page_file(FILES[name], name, HEADERS | KEPT)
