"""Chat models: how prompts are rendered, from the settings to the exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.http import Message
from dvp_rl.engines.tokenizer import load_tokenizer
from dvp_rl.weights.folder import CHAT_TEMPLATE
from dvp_trainer.config import TrainSettings
from dvp_trainer.setup import open_tokenizer, open_training
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
        (CHAT, {"chat_template": "REFUSES"}, r"row 0: messages: the chat template refused them: no system"),
    ],
)
def test_settings_that_would_have_no_effect_or_cannot_work_are_refused(
    tmp_path: Path, model: Path, template: str, prompt: object, settings: dict[str, str], expected: str
) -> None:
    (tmp_path / "bad.jinja").write_text("{{ messages } }")
    (tmp_path / "refuses.jinja").write_text("{{ raise_exception('no system') }}")
    files = {"TEMPLATE": template, "BAD": str(tmp_path / "bad.jinja"), "REFUSES": str(tmp_path / "refuses.jinja")}
    more = {f"data__{name}": files.get(value, value) for name, value in settings.items()}
    with pytest.raises(ConfigError, match=expected):
        first_prompt(tmp_path, options(model, rows(tmp_path, prompt), **more))


def test_chats_for_a_model_without_a_template(tmp_path: Path, template: str) -> None:
    model = make_model(tmp_path / "plain", chat=False)
    with pytest.raises(ConfigError, match=r"row 0 is a chat, but the model has no chat template; name one with data\."):
        first_prompt(tmp_path, options(model, rows(tmp_path, CHAT)))
    assert first_prompt(tmp_path, options(model, rows(tmp_path, CHAT), data__chat_template=template)).endswith("you: ")


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
    train(["export", str(out), f"--to={tmp_path / 'exported'}"])
    tokenizer = load_tokenizer(tmp_path / "exported")
    messages = [Message(role="system", content="add"), Message(role="user", content="1+1=")]
    ids = tokenizer.encode_chat(messages, {"enable_thinking": False})
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered
