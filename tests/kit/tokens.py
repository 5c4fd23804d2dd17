"""Tokens for services in tests, and token folders."""

from __future__ import annotations

import secrets
from pathlib import Path

from dvp_rl.http.api_tokens import Scope

TOKEN = "a-token-of-these-tests"


def write_token(folder: Path, scope: Scope, name: str, *tokens: str) -> str:
    """Writes tokens to folder/scope/name atomically; returns the first. Without `tokens`, generates one."""
    tokens = tokens or (secrets.token_hex(24),)
    file = folder / scope / name
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{name}")
    partial.write_text("\n".join(tokens) + "\n")
    partial.replace(file)
    return tokens[0]
