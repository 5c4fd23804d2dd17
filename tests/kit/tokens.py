"""Tokens of services in tests, and folders of them."""

from __future__ import annotations

import secrets
from pathlib import Path

from dvp_rl.http.tokens import Scope

TOKEN = "a-token-of-these-tests"


def write_token(folder: Path, scope: Scope, name: str, *tokens: str) -> str:
    """Into folder/scope/name, in one step; the first is returned, and drawn if there is none."""
    tokens = tokens or (secrets.token_hex(24),)
    file = folder / scope / name
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{name}")
    partial.write_text("\n".join(tokens) + "\n")
    partial.replace(file)
    return tokens[0]
