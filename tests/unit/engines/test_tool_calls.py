"""Formats of tool calls are found by rendering templates, and calls are read out of sampled text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from dvp_rl.engines.tool_calls import Render, ToolCall, ToolFormat, tool_format
from tests.kit.chat_templates import CHATS, Chat, make_chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
ASK = {"role": "user", "content": "What is 1 + 2?"}
QWEN = ToolFormat(
    opening="<tool_call>\n",
    closing="\n</tool_call>",
    name_key="name",
    arguments_key="arguments",
    id_key=None,
    verbatim=False,
    separator="\n</tool_call>\n<tool_call>\n",
)
FORMATS = {
    "qwen25": QWEN,
    "qwen3": replace(QWEN, verbatim=True),
    "llama3": None,
    "llama31": ToolFormat("", "", "name", "parameters", None, verbatim=False),
    "gemma": None,
    "mistral": ToolFormat("[TOOL_CALLS][", "]", "name", "arguments", "id", verbatim=False, separator=", "),
}
LLAMA, MISTRAL = FORMATS["llama31"], FORMATS["mistral"]
CALL = '{"name": "add", "arguments": {"a": 1}}'
ADD = ToolCall("add", '{"a": 1}')


def renderer(chat: Chat, **kwargs: Any) -> Render:
    core = make_chat_tokenizer(chat)

    def render(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        text = core.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
        )
        assert isinstance(text, str)
        return text

    return render


@cache
def rendered(name: str) -> Render:
    return renderer(CHATS[name])


def templated(turn: Callable[[list[Mapping[str, Any]]], str], prompt: str = "assistant:", lead: str = "") -> Render:
    """A template that writes `turn(calls)` for calls and `lead` before the content of other turns."""

    def render(messages: Sequence[Mapping[str, Any]], _: Any, add_generation_prompt: bool) -> str:
        text = ""
        for message in messages:
            calls = [call["function"] for call in message.get("tool_calls", [])]
            before = lead if message["role"] == "assistant" else ""
            text += f"{message['role']}:{turn(calls) if calls else before + message['content']}<end>"
        return text + (prompt if add_generation_prompt else "")

    return render


def written(name: str, text: str) -> str:
    """The assistant's turn as the template writes it when it is given what was parsed."""
    form = FORMATS[name]
    assert form is not None
    content, calls = form.parse(text)
    assert calls
    functions = [
        {"name": call.name, "arguments": call.arguments if form.verbatim else json.loads(call.arguments)}
        for call in calls
    ]
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": call.call_id, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ],
    }
    prompt = rendered(name)([ASK], TOOLS, True)
    whole = rendered(name)([ASK, message], TOOLS, False)
    assert whole.startswith(prompt)
    return whole[len(prompt) :].rstrip().removesuffix(CHATS[name].end)


@pytest.mark.parametrize("name", CHATS)
def test_the_format_is_found_by_rendering(name: str) -> None:
    assert tool_format(rendered(name), [CHATS[name].end]) == FORMATS[name]


@pytest.mark.parametrize("thinking", [True, False])
def test_an_empty_block_of_thoughts_is_no_part_of_the_opening(thinking: bool) -> None:
    assert tool_format(renderer(CHATS["qwen3"], enable_thinking=thinking), ["<|im_end|>"]) == FORMATS["qwen3"]


def test_a_prompt_that_opens_thoughts_need_not_precede_the_call() -> None:
    render = templated(lambda calls: f"<tool_call>{json.dumps(calls[0])}", prompt="assistant:<think>\n")
    assert tool_format(render, ["<end>"]) == ToolFormat("<tool_call>", "", "name", "arguments", None, verbatim=False)


def test_what_precedes_other_content_need_not_precede_the_call() -> None:
    render = templated(lambda calls: f"\n<call>{json.dumps(calls[0])}", lead=" ")
    assert tool_format(render, ["<end>"]) == ToolFormat("<call>", "", "name", "arguments", None, verbatim=False)


@pytest.mark.parametrize("verbatim", [True, False])
def test_arguments_that_come_back_otherwise_are_not_verbatim(verbatim: bool) -> None:
    def turn(calls: list[Mapping[str, Any]]) -> str:
        arguments = calls[0]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return f'{{"name": "{calls[0]["name"]}", "arguments": {text if verbatim else json.dumps(json.loads(text))}}}'

    form = tool_format(templated(turn), ["<end>"])
    assert form is not None
    assert form.verbatim == verbatim


def test_a_turn_that_begins_unlike_any_other_has_no_format() -> None:
    render = templated(lambda calls: json.dumps(calls[0]), prompt="assistant:<think>", lead="<answer>")
    assert tool_format(render, ["<end>"]) is None


@pytest.mark.parametrize("ends", [["<end>"], ["<other>", "", "<end>"]])
def test_the_closing_ends_where_the_turn_does(ends: list[str]) -> None:
    form = tool_format(templated(lambda calls: f"({json.dumps(calls[0])}) \n"), ends)
    assert form is not None
    assert (form.opening, form.closing) == ("(", ")")


@pytest.mark.parametrize(
    "turn",
    [
        lambda calls: f"<function={calls[0]['name']}><parameter=probe_key>1</parameter></function>",
        lambda calls: f"<function={calls[0]['name']}>{json.dumps(calls[0]['arguments'])}</function>",
        lambda calls: f"<call {calls[0]['name']}>{json.dumps(calls[0])}</call>",
        lambda calls: json.dumps({"type": "function", "function": calls[0]}),
        lambda calls: json.dumps([calls[0]["name"], calls[0]["arguments"]]),
        lambda calls: json.dumps(calls[0] | {"arguments": json.dumps(calls[0]["arguments"])}),
        lambda calls: repr(calls[0]),
        lambda calls: json.dumps({"name": calls[0]["name"]}),
        lambda calls: "no calls here",
        lambda calls: 1 / 0,
    ],
    ids=["xml", "tagged", "named", "nested", "list", "quoted", "python", "bare", "none", "raises"],
)
def test_other_ways_to_write_calls_are_no_format(turn: Callable[[list[Mapping[str, Any]]], str]) -> None:
    assert tool_format(templated(turn), ["<end>"]) is None


def test_a_call_in_another_turn_is_no_format() -> None:
    assert tool_format(templated(lambda calls: f"<end>{json.dumps(calls[0])}"), ["<end>"]) is None


@pytest.mark.parametrize(
    "turn",
    [
        lambda calls: json.dumps(calls[0]),
        lambda calls: f"{len(calls)}:" + ";".join(map(json.dumps, calls)),
        lambda calls: ";".join(map(json.dumps, calls)) + ")" * len(calls),
    ],
    ids=["drops the second", "opens otherwise", "closes otherwise"],
)
def test_two_calls_that_are_not_written_like_one_have_no_separator(
    turn: Callable[[list[Mapping[str, Any]]], str],
) -> None:
    form = tool_format(templated(turn), ["<end>"])
    assert form is not None
    assert form.separator is None


def test_a_template_that_refuses_everything_has_no_format() -> None:
    def refuse(*_: object) -> str:
        raise RuntimeError("no")

    assert tool_format(refuse, ["<end>"]) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen25", f"<tool_call>\n{CALL}\n</tool_call>"),
        ("qwen25", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"),
        ("qwen3", f"<think>\nAdd them.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>"),
        ("qwen3", f"<think>\nAdd them.\n</think>\n\nI add.\n<tool_call>\n{CALL}\n</tool_call>"),
        (
            "qwen3",
            '<think>\nx\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a":1e0 ,"é":"\\u00e9"}}\n</tool_call>',
        ),
        ("llama31", '{"name": "add", "parameters": {"a": "é \\n {}"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "012345678"}]'),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "a12345678"}, '
            '{"name": "mul", "arguments": {"b": [{}]}, "id": "b12345678"}]',
        ),
    ],
)
def test_parsed_calls_render_to_the_sampled_text(name: str, text: str) -> None:
    assert written(name, text) == text


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>{CALL}</tool_call>", "", [ADD]),
        (f" \n<tool_call> \n\n{CALL}\t</tool_call>\n\n", "", [ADD]),
        (f" I add. \n\n<tool_call>\n{CALL}\n</tool_call>", " I add.", [ADD]),
        (f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", "", [ADD, ADD]),
        (f"A <tool_call> it is.\n<tool_call>\n{CALL}\n</tool_call>", "A <tool_call> it is.", [ADD]),
        ('<tool_call>{ "arguments" :{} , "name":"é" }</tool_call>', "", [ToolCall("é", "{}")]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}, "why": [{}], "id": 7}</tool_call>', "", [ADD]),
        ('<tool_call>{"name": "\\u0061dd", "arguments": {"a": 1}}</tool_call>', "", [ADD]),
        (
            '<tool_call>{"name": "say", "arguments": {"x":  "<tool_call>{\\"</tool_call>\\u0041é"}}</tool_call>',
            "",
            [ToolCall("say", '{"x":  "<tool_call>{\\"</tool_call>\\u0041é"}')],
        ),
    ],
)
def test_calls_are_read_with_any_whitespace_and_their_arguments_as_written(
    text: str, content: str, calls: list[ToolCall]
) -> None:
    assert QWEN.parse(text) == (content, calls)


@pytest.mark.parametrize(
    "call",
    [
        "{}",
        '{"name": "add"}',
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": null, "arguments": {}}',
        '{"name": "add", "arguments": null}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": "{}"}',
        '{"name": "add", "parameters": {}}',
        '{"name": "add", "name": "mul", "arguments": {}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1,}}',
        '{"name": "add", "arguments": {"a": 1}',
        '{"name": "add", "arguments": {"a": 1}},',
        '{"name": "add", "arguments": {}} {}',
        '{"name": "add", "arguments": {},}',
        '{"name": "add" "arguments": {}}',
        '{"name", "add", "arguments": {}}',
        '{1: 2, "name": "add", "arguments": {}}',
        '{"name": "add", "arguments": {"a": "\n"}}',
        "{'name': 'add', 'arguments': {}}",
        "[" + CALL + "]",
        "add",
        "",
    ],
)
def test_what_is_not_well_formed_is_text(call: str) -> None:
    for text in (
        f"<tool_call>\n{call}\n</tool_call>",
        f"Well. <tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>",
    ):
        assert QWEN.parse(text) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  3\n",
        CALL,
        f"<tool_call>\n{CALL}",
        f"<tool_call>\n{CALL}\n</tool_call",
        f"<tool_call>\n{CALL}\n</tool_call> Done.",
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>",
        f"<tool_call>\n{CALL}\n<tool_call>\n{CALL}\n</tool_call>",
        f"<tool_call>\n{CALL}\n</tool_call>\n{CALL}",
        f"{CALL}\n</tool_call>",
    ],
)
def test_calls_that_are_not_opened_and_closed_are_text(text: str) -> None:
    assert QWEN.parse(text) == (text, [])


def test_without_an_opening_the_whole_text_is_the_call() -> None:
    assert LLAMA is not None
    call = '{"name": "add", "parameters": {"a": 1}}'
    assert LLAMA.parse(f"\n {call}\n") == ("", [ADD])
    for text in (f"I add. {call}", f"{call} Done.", f"{call}{call}", f"{call}; {call}", "", " ", "3", CALL):
        assert LLAMA.parse(text) == (text, [])


@pytest.mark.parametrize("separator", ["", " ", "; "])
def test_without_an_opening_several_calls_are_read_where_the_template_writes_several(separator: str) -> None:
    form = ToolFormat("", "", "name", "arguments", None, verbatim=False, separator=separator)
    assert form.parse(f"{CALL}{separator}{CALL}\n") == ("", [ADD, ADD])
    assert form.parse(f"{CALL}{separator}{CALL},") == (f"{CALL}{separator}{CALL},", [])


def test_ids_are_read_where_the_format_has_one() -> None:
    assert MISTRAL is not None
    plain, named = CALL, CALL[:-1] + ', "id": "x"}'
    assert MISTRAL.parse(f"[TOOL_CALLS][{plain}]") == ("", [ADD])
    assert MISTRAL.parse(f"So: [TOOL_CALLS][ {named},{plain} ]") == ("So:", [replace(ADD, call_id="x"), ADD])
    for text in (f'[TOOL_CALLS][{CALL[:-1]}, "id": 1}}]', f"[TOOL_CALLS][{plain} {plain}]", f"[TOOL_CALLS][{plain},]"):
        assert MISTRAL.parse(text) == (text, [])


@pytest.mark.parametrize("form", [QWEN, LLAMA, MISTRAL], ids=["qwen", "llama", "mistral"])
@pytest.mark.parametrize(
    "unit",
    [
        *("{", "<tool_call>", "<tool_call>{", "<tool_call>\n", "[TOOL_CALLS][", "[TOOL_CALLS][{", " ", "\n\t"),
        *('{"a":', '{"name":', "[", '{"name": "a", "arguments": {"a": [', '<tool_call>{"', "\\", '"', "é"),
        *(f"<tool_call>{CALL}</tool_call>", f"{CALL}, ", "</tool_call>", "1"),
    ],
)
def test_hostile_text_is_read_once(form: ToolFormat, unit: str) -> None:
    """A quadratic search would outlast the time limit of the tests."""
    length = 1 << 20
    for start in ("", form.opening, form.opening + '{"name": "a", "arguments": {"a": ', form.opening + CALL):
        text = start + unit * (length // len(unit)) + "!"
        assert form.parse(text) == (text, [])


def test_deep_nesting_is_text() -> None:
    deep = '{"name": "add", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_001
    for text in (f"<tool_call>{deep}</tool_call>", f"<tool_call>{CALL}</tool_call><tool_call>{deep}</tool_call>"):
        assert QWEN.parse(text) == (text, [])


def test_many_calls_are_all_read() -> None:
    text = "".join(f"<tool_call>{CALL}</tool_call>\n" for _ in range(10_000))
    assert QWEN.parse("Go." + text) == ("Go.", [ADD] * 10_000)


@pytest.mark.parametrize("name", CHATS)
def test_the_kit_tokenizer_keeps_every_text(name: str) -> None:
    chat = CHATS[name]
    core = make_chat_tokenizer(chat)
    text = f'<think>\nthe tool "é\u2028😀\x00": 1</think>\n\n<tool_call>{CALL}</tool_call>'
    ids = core.encode(text)
    assert core.decode(ids, skip_special_tokens=True) == text
    assert len(ids) < len(text.encode()), "merges and tokens of tags make it shorter than its bytes"
    assert core.decode(core.encode(text + chat.end), skip_special_tokens=True) == text
    assert len(core) == 320
    assert (core.bos_token, core.eos_token) == (chat.bos, chat.end)


def test_a_vocabulary_too_small_for_the_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at least") as refused:
        make_chat_tokenizer(CHATS["qwen3"], vocab_size=200)
    least = int(str(refused.value).rsplit(maxsplit=1)[-1])
    assert len(make_chat_tokenizer(CHATS["qwen3"], vocab_size=least)) == least
