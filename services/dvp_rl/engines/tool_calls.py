"""Tool calls in sampled text. The format comes from the model's chat template, which is rendered with a call whose name
and arguments are known; no table of model families is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, bool], str]
"""Renders (messages, tools, add_generation_prompt) to text with the model's chat template. Raises what the template
raises, which may be any exception."""


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text of an object, exactly as the model wrote it. `json.loads` reads it."""
    call_id: str | None = None
    """The id that the model wrote; None if it wrote none or its format has none."""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls: `opening`, one JSON object per call with `separator` between them, `closing`."""

    opening: str
    """Text before the first object, e.g. "<tool_call>\\n"; "" if the object is the whole turn, as in Llama 3.1."""
    closing: str
    """Text after the last object, e.g. "\\n</tool_call>"."""
    name_key: str
    arguments_key: str
    id_key: str | None
    verbatim: bool
    """True: the template inserts arguments that are a str unchanged. False: it needs them parsed to a dict."""
    separator: str | None = None
    """Text between two objects, e.g. "\\n</tool_call>\\n<tool_call>\\n". None: the template allows one call only."""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """(content before the calls, calls); (text, []) unless everything from the first call on is well-formed.

        `text` has no end token. Whitespace may differ from the template's. An object may have further keys but none
        twice. Linear in the length of the text.
        """
        opening = re.compile(_spaced(self.opening) + _BEFORE_OBJECT)
        begun = opening.search(text) if self.opening.strip() else opening.match(text)
        if begun is None:
            return text, []
        try:
            calls, end = self._read_calls(text, begun.end())
        except (ValueError, RecursionError):  # not JSON, or nested too deep for json
            return text, []
        if not re.compile(r"\s*+" + _spaced(self.closing) + r"\s*+").fullmatch(text, end):
            return text, []
        return text[: begun.start()].rstrip(), calls

    def _read_calls(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        """The calls whose first object begins at `at`, and where the last one ends. Raises as `_read_object`."""
        separator = None if self.separator is None else re.compile(r"\s*+" + _spaced(self.separator) + _BEFORE_OBJECT)
        calls: list[ToolCall] = []
        while True:
            members, end = _read_object(text, at)
            calls.append(self._call(members))
            following = separator.match(text, end) if separator else None
            if following is None:
                return calls, end
            at = following.end()

    def _call(self, members: Mapping[str, str]) -> ToolCall:
        """Raises ValueError if a member lacks or has the wrong type."""
        name, arguments = json.loads(members.get(self.name_key, "null")), members.get(self.arguments_key, "null")
        call_id = json.loads(members.get(self.id_key, "null")) if self.id_key else None
        if not (isinstance(name, str) and name and arguments.startswith("{") and isinstance(call_id, str | None)):
            raise ValueError(f"no tool call: {members}")
        json.dumps(json.loads(arguments), ensure_ascii=False).encode()  # a lone surrogate is no text
        return ToolCall(name, arguments, call_id)


def tool_format(render: Render, ends: Sequence[str]) -> ToolFormat | None:
    """How the template writes tool calls; None if it writes none, or not as JSON objects that hold name and arguments.

    `ends`: texts of the tokens that end a turn, e.g. "<|im_end|>".
    """
    begins = _turn_begins(render)
    for arguments in ('{"probe_key":1}', {"probe_key": 1}):  # json would write a space, so a text that returns is as is
        turn = _render_turn(render, [_call("probe_tool", arguments, "abcdefghi")], begins, ends)
        found = _find_call(turn, "probe_tool")
        if found is None:
            continue
        start, end, keys = found
        if isinstance(arguments, str) and arguments not in turn[start:end]:
            continue
        opening, closing = turn[:start].lstrip(), turn[end:]
        if "probe_tool" in opening + closing or "abcdefghi" in opening + closing:
            return None
        calls = [_call("probe_tool", arguments, "abcdefghi"), _call("probe_other", arguments, "ihgfedcba")]
        separator = _separator(_render_turn(render, calls, begins, ends), opening, closing)
        return ToolFormat(opening, closing, *keys, verbatim=isinstance(arguments, str), separator=separator)
    return None


_USER = {"role": "user", "content": "probe"}
_CONTENT = "probe_content"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Probe.",
            "parameters": {"type": "object", "properties": {"probe_key": {"type": "integer"}}},
        },
    }
    for name in ("probe_tool", "probe_other")
]


def _call(name: str, arguments: object, call_id: str) -> dict[str, Any]:
    # Mistral's templates demand an id of nine letters or digits.
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _turn_begins(render: Render) -> list[str]:
    """What may stand before the assistant's text: the prompt for it, and what precedes the content of a finished turn,
    which in Qwen3 is longer by an empty block of thoughts and elsewhere lacks an opened one."""
    prompt = _attempt(render, [_USER], True)
    finished, _, _ = _attempt(render, [_USER, {"role": "assistant", "content": _CONTENT}], False).rpartition(_CONTENT)
    return sorted(filter(None, (prompt, finished)), key=len, reverse=True)


def _render_turn(render: Render, calls: Sequence[Mapping[str, Any]], begins: Sequence[str], ends: Sequence[str]) -> str:
    """What the assistant writes to make these calls, without the end token; "" if the template writes no such turn."""
    text = _attempt(render, [_USER, {"role": "assistant", "content": "", "tool_calls": calls}], False)
    begin = next((begin for begin in begins if text.startswith(begin)), None)
    if begin is None:
        return ""
    turn = text[len(begin) :]
    return turn[: min((turn.index(end) for end in ends if end and end in turn), default=len(turn))].rstrip()


def _attempt(render: Render, messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
    try:
        return render(messages, _TOOLS, prompt)
    except Exception:  # noqa: BLE001 - a template is a program by the model's author
        return ""


def _find_call(turn: str, name: str, at: int = 0) -> tuple[int, int, tuple[str, str, str | None]] | None:
    """Start and end of the turn's first JSON object, and its keys for name, arguments and id. None if it is no call,
    as when it holds the name deeper than in a member of its own."""
    for brace in re.finditer(r"\{", turn[at:]):
        start = at + brace.start()
        try:
            members, end = _read_object(turn, start)
        except (ValueError, RecursionError):
            continue
        key = {json.dumps(json.loads(value)): key for key, value in members.items()}
        name_key, arguments_key = key.get(json.dumps(name)), key.get('{"probe_key": 1}')
        id_key = key.get('"abcdefghi"') or key.get('"ihgfedcba"')
        return (start, end, (name_key, arguments_key, id_key)) if name_key and arguments_key else None
    return None


def _separator(turn: str, opening: str, closing: str) -> str | None:
    """Text between the objects of a turn with two calls; None if it isn't built as a turn with one."""
    first = _find_call(turn, "probe_tool")
    second = _find_call(turn, "probe_other", first[1]) if first else None
    if first is None or second is None or turn[: first[0]].lstrip() != opening or turn[second[1] :] != closing:
        return None
    return turn[first[1] : second[0]]


def _refuse_constant(text: str) -> None:
    raise ValueError(f"no JSON: {text}")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)  # Python's json would take NaN and Infinity
_BEFORE_OBJECT = r"\s*+(?=\{)"
_BEGIN = re.compile(r"(\{)[ \t\n\r]*+")
_COLON = re.compile(r"[ \t\n\r]*+:[ \t\n\r]*+")
_NEXT = re.compile(r"[ \t\n\r]*+([,}])[ \t\n\r]*+")


def _spaced(marker: str) -> str:
    """A pattern for the marker with any whitespace where it has some; none of it at its ends."""
    return r"\s*+".join(re.escape(part) for part in marker.split())


def _read_object(text: str, at: int) -> tuple[dict[str, str], int]:
    """JSON text of each member of the object that begins at `at`, and where the object ends.

    Raises ValueError (no JSON object, or a key twice) and RecursionError (nested too deep).
    """
    members: dict[str, str] = {}
    mark = _BEGIN.match(text, at)
    while mark is not None and mark[1] != "}":
        key, end = _JSON.raw_decode(text, mark.end())
        colon = _COLON.match(text, end)
        if not isinstance(key, str) or key in members or colon is None:
            raise ValueError(f"no JSON object: a bad key at {mark.end()}")
        _, end = _JSON.raw_decode(text, colon.end())
        members[key] = text[colon.end() : end]
        mark = _NEXT.match(text, end)
    if mark is None:
        raise ValueError("no JSON object: it isn't closed")
    return members, mark.end(1)
