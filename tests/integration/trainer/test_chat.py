"""Chat models: how prompts are rendered, from the settings to the exported model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.http import RolloutRequest
from dvp_rl.engines.tokenizer import load_tokenizer
from dvp_rl.weights.folder import CHAT_TEMPLATE
from dvp_trainer.config import TrainSettings
from dvp_trainer.data.rendering import open_tokenizer, open_training
from dvp_trainer.report.starts import last_start
from tests.kit.models import CHAT_TEMPLATE as MODELS_OWN
from tests.kit.models import make_model
from tests.kit.runs import config, replica, run_trainer, train

OWN = MODELS_OWN.replace("'<' + m['role'] + '>'", "m['role'] + ': '").replace("'<assistant>'", "' you: '")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def template(tmp_path: Path) -> str:
    (tmp_path / "own.jinja").write_text(OWN)
    return str(tmp_path / "own.jinja")


def rows(folder: Path, *prompts: object) -> str:
    """A data set of these prompts."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    return str(file)


def options(model: Path, data: str, **more: str) -> dict[str, str | None]:
    return {"model__path": str(model), "data__train": data, "reward__name": "exact_match", **more}


def first_prompt(folder: Path, options: Mapping[str, str | None]) -> str:
    """The first prompt of a run as its model reads it. Raises ConfigError as the run would."""
    settings = TrainSettings.load(config(folder, "chat", "redis://127.0.0.1:1", **options))
    tokenizer = open_tokenizer(settings)
    (prompt, *_) = open_training(settings, tokenizer).first(1)
    ids = tokenizer.encode(prompt.prompt) if isinstance(prompt.prompt, str) else tokenizer.encode_chat(prompt.prompt)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("settings", "rendered"),
    [
        ({}, "1+1="),
        ({"as_chat": "true"}, "<user>1+1=<assistant>"),
        ({"as_chat": "true", "chat_template_kwargs": "enable_thinking=false"}, "<user>1+1=<assistant>--"),
        ({"as_chat": "true", "chat_template_kwargs": '{"enable_thinking": true}'}, "<user>1+1=<assistant>"),
        ({"as_chat": "true", "chat_template": "TEMPLATE"}, "user: 1+1= you: "),
        ({"system_prompt": "add", "chat_template": "TEMPLATE"}, "system: adduser: 1+1= you: "),
    ],
)
def test_settings_decide_how_a_prompt_is_rendered(
    tmp_path: Path, model: Path, template: str, settings: dict[str, str], rendered: str
) -> None:
    more = {f"data__{name}": template if value == "TEMPLATE" else value for name, value in settings.items()}
    assert first_prompt(tmp_path, options(model, rows(tmp_path, "1+1="), **more)) == rendered


CHAT = [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(
    ("prompt", "settings", "expected"),
    [
        (
            "1+1=",
            {"chat_template_kwargs": "enable_thinking=false"},
            r"data\.chat_template_kwargs is set, but \S+ holds",
        ),
        ("1+1=", {"chat_template": "TEMPLATE"}, r"data\.chat_template is set, but \S+ holds plain text: data\.as_chat"),
        (
            CHAT,
            {"chat_template_kwargs": "enable_thinkin=false"},
            r"row 0: .*no argument 'enable_thinkin'; did you mean",
        ),
        (CHAT, {"chat_template": "none.jinja"}, r"data\.chat_template none\.jinja: .*No such file"),
        (CHAT, {"chat_template": "BAD"}, r"data\.chat_template \S+: unexpected '}'"),
        (CHAT, {"chat_template": "EMPTY"}, r"data\.chat_template \S+: the file is empty"),
        (CHAT, {"chat_template": "DEEP"}, r"data\.chat_template \S+: maximum recursion depth"),
        (CHAT, {"chat_template": "SILENT"}, r"row 0 becomes no token at all"),
        (CHAT, {"chat_template": "MUTE", "system_prompt": "add"}, r"data\.system_prompt has no effect: the chat templ"),
        (CHAT, {"chat_template_kwargs": '{"enable_thinking": {"a": [null]}}'}, r"null is not allowed: leave the arg"),
        (CHAT, {"system_prompt": "\udcff"}, r"data\.system_prompt: not UTF-8 text"),
        ("\ud800", {}, r"row 0, prompt: not Unicode text"),
        (CHAT, {"chat_template": "REFUSES"}, r"row 0: messages: the chat template refused them: no system"),
    ],
)
def test_settings_that_would_have_no_effect_or_cannot_work_are_refused(
    tmp_path: Path, model: Path, template: str, prompt: object, settings: dict[str, str], expected: str
) -> None:
    texts = {
        "BAD": "{{ messages } }",
        "REFUSES": "{{ raise_exception('no system') }}",
        "EMPTY": "",
        "DEEP": f"{{{{ {'(' * 3000}1{')' * 3000} }}}}",
        "SILENT": "{# nothing #}",
        "MUTE": "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}",
    }
    files = {"TEMPLATE": template, **{name: str(tmp_path / f"{name}.jinja") for name in texts}}
    for name, text in texts.items():
        Path(files[name]).write_text(text)
    more = {f"data__{name}": files.get(value, value) for name, value in settings.items()}
    with pytest.raises(ConfigError, match=expected):
        first_prompt(tmp_path, options(model, rows(tmp_path, prompt), **more))


def test_chats_for_a_model_without_a_template(tmp_path: Path, template: str) -> None:
    model = make_model(tmp_path / "plain", chat=False)
    with pytest.raises(ConfigError, match=r"row 0 is a chat, but the model has no chat template; name one with data\."):
        first_prompt(tmp_path, options(model, rows(tmp_path, CHAT)))
    assert first_prompt(tmp_path, options(model, rows(tmp_path, CHAT), data__chat_template=template)).endswith("you: ")


def test_a_byte_order_mark_is_no_part_of_the_template(tmp_path: Path, model: Path) -> None:
    (tmp_path / "bom.jinja").write_text(OWN, encoding="utf-8-sig")
    more = {"data__chat_template": str(tmp_path / "bom.jinja")}
    assert first_prompt(tmp_path, options(model, rows(tmp_path, CHAT), **more)) == "user: 1+1= you: "


def test_a_model_with_several_templates(tmp_path: Path, model: Path) -> None:
    """Without tools the one named default is used; if there is none, the model has none for us."""
    (model / CHAT_TEMPLATE).unlink()
    file = model / "tokenizer_config.json"
    named = [{"name": name, "template": f"{{{{ '{name}' }}}}"} for name in ("default", "tool_use")]
    for templates, expected in ((named, "default"), (named[1:], None)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": templates}))
        assert first_prompt(tmp_path, options(model, rows(tmp_path, "1+1="))) == "1+1="
        if expected:
            assert first_prompt(tmp_path, options(model, rows(tmp_path, CHAT))) == expected
        else:
            with pytest.raises(ConfigError, match="the model has no chat template"):
                first_prompt(tmp_path, options(model, rows(tmp_path, CHAT)))


def test_a_template_that_ignores_the_messages_is_pointed_out(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "same.jinja").write_text("hi")
    chats = [[{"role": "user", "content": text}] for text in ("1+1=", "2+2=")]
    first_prompt(tmp_path, options(model, rows(tmp_path, *chats), data__chat_template=str(tmp_path / "same.jinja")))
    assert "differ, but become the same tokens" in caplog.text


def test_a_template_that_fills_the_context_leaves_no_prompt(tmp_path: Path, model: Path) -> None:
    """Prompts are not counted if they are short; a template may be long all the same."""
    (tmp_path / "long.jinja").write_text("1" * 2000 + "{{ messages[0]['content'] }}")
    more = options(model, rows(tmp_path, CHAT), data__chat_template=str(tmp_path / "long.jinja"))
    with pytest.raises(ConfigError, match=r"no prompt is left: .* and 1 fill the model's context of 256 tokens"):
        first_prompt(tmp_path, more)


def test_everything_that_changes_a_prompt_changes_the_fingerprint(tmp_path: Path, model: Path, template: str) -> None:
    def fingerprint(data: str, **more: str) -> str:
        flags = config(tmp_path, "chat", "redis://127.0.0.1:1", **options(model, data, **more))
        settings = TrainSettings.load(flags)
        return open_training(settings, open_tokenizer(settings)).fingerprint

    def turns(*texts: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text} for role, text in zip(("system", "user"), texts, strict=True)]

    text = rows(tmp_path, "a\n\n1")
    found = [
        fingerprint(text),
        fingerprint(text, data__as_chat="true"),
        fingerprint(text, data__system_prompt="a"),
        fingerprint(text, data__as_chat="true", data__chat_template=template),
        fingerprint(text, data__as_chat="true", data__chat_template_kwargs="enable_thinking=false"),
        fingerprint(rows(tmp_path, "1"), data__system_prompt="a"),
        *(
            fingerprint(rows(tmp_path, chat), data__as_chat="true")
            for chat in (turns("a", "b\n\nc"), turns("a\n\nb", "c"))
        ),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.slow
def test_chats_without_settings_are_recorded(tmp_path: Path, broker_url: str, run_id: str, model: Path) -> None:
    for folder, prompt, roles in (("plain", "1+1=", ()), ("chat", CHAT, ("user",))):
        (tmp_path / folder).mkdir()
        settings = options(model, rows(tmp_path / folder, prompt))
        with replica(tmp_path / folder, f"{run_id}-{folder}", broker_url, f"--model={model}"):
            train(config(tmp_path / folder, f"{run_id}-{folder}", broker_url, steps="1", **settings))
        assert last_start(tmp_path / folder / "run").roles == roles


@pytest.mark.slow
def test_a_run_samples_publishes_and_exports_what_its_settings_say(
    tmp_path: Path, broker_url: str, run_id: str, model: Path, template: str
) -> None:
    rendered = "system: adduser: 1+1= you: --"
    more = {"chat_template": template, "chat_template_kwargs": "enable_thinking=False", "system_prompt": "add"}
    settings = options(model, rows(tmp_path, "1+1="), **{f"data__{name}": text for name, text in more.items()})
    flags = config(tmp_path, run_id, broker_url, steps="2", **settings)
    with replica(tmp_path, run_id, broker_url, f"--model={model}"):
        train(flags)
        changed = run_trainer([*flags, "--data.chat-template-kwargs=enable_thinking=true", "--steps=3"])
        assert "chat settings) is not what the checkpoint of step 2 was trained on" in changed.stderr
    out = tmp_path / "run"
    shown = [
        completion["prompt"]
        for line in (out / "completions.jsonl").read_text().splitlines()
        for completion in json.loads(line)["completions"]
    ]
    assert set(shown) == {rendered}
    (published, *_) = (out / "weights").glob("*/weights-*")
    assert (published / CHAT_TEMPLATE).read_text() == OWN

    (tmp_path / "own.jinja").unlink()
    *_, ask, _ = train(["export", str(out), f"--to={tmp_path / 'exported'}"]).splitlines()
    request = RolloutRequest.model_validate_json(shlex.split(ask)[-1])
    tokenizer = load_tokenizer(tmp_path / "exported")
    assert request.messages is not None
    messages = [
        message.model_copy(update={"content": message.content.replace("...", "1+1=")}) for message in request.messages
    ]
    ids = tokenizer.encode_chat(messages, request.chat_template_kwargs)
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered
