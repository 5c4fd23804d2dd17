"""Precedence, unknown keys, dry run and messages of the settings base class."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from dvp_rl.contract.errors import ConfigError
from dvp_rl.monitor.settings import MonitorSettings
from dvp_rl.rollout.settings import RolloutSettings
from dvp_rl.settings import Section, Settings, masked, user_errors

SERVICES = Path(__file__).parents[3] / "services"


class Queue(Section):
    url: str = "redis://localhost"
    batch: Annotated[int, Field(ge=1, le=64)] = 8
    password: SecretStr | None = None


class Rule(Section):
    veto: Annotated[float, Field(gt=0)] | None = 1e-4
    name: str | None = None


class Example(Settings):
    model_config = SettingsConfigDict(env_prefix="DVP_EXAMPLE__", cli_prog_name="dvp-example")

    model: Path
    """Folder of the model."""
    learning_rate: float = 1e-6
    eager: bool = False
    stop: tuple[str, ...] = ()
    token: SecretStr | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    queue: Queue = Queue()
    rule: Rule = Rule()
    note: str = ""
    prose: ClassVar[frozenset[str]] = frozenset({"note", "options"})


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("DVP_"):
            monkeypatch.delenv(name)


def load(*argv: str, toml_file: Path | None = None) -> Example:
    return Example.load(argv, toml_file)


def write(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text)
    return file


def test_defaults_and_flags() -> None:
    settings = load("--model", "m", "--learning-rate", "1e-5", "--queue.url", "redis://b", "--eager")
    assert settings.model == Path("m")
    assert settings.learning_rate == 1e-5
    assert settings.eager
    assert settings.queue == Queue(url="redis://b", batch=8)


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, 'model = "file"\nlearning_rate = 2e-6\n[queue]\nurl = "redis://file"\nbatch = 2\n')
    monkeypatch.setenv("DVP_EXAMPLE__MODEL", "environment")
    monkeypatch.setenv("DVP_EXAMPLE__QUEUE__URL", "redis://environment")
    settings = load("--model", "flag", "--config", str(file))
    assert (settings.model, settings.queue.url) == (Path("flag"), "redis://environment")
    assert (settings.learning_rate, settings.queue.batch, settings.eager) == (2e-6, 2, False)


def test_the_file_can_be_given_by_argument_and_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, 'model = "file"\n')
    assert load(toml_file=file).model == Path("file")
    monkeypatch.setenv("DVP_EXAMPLE__CONFIG", str(file))
    assert load().model == Path("file")


def test_free_form_dictionaries_take_any_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVP_EXAMPLE__OPTIONS__DEPTH", "3")
    assert load("--model", "m").options == {"depth": "3"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--modle", "m"], "unknown option --modle; did you mean --model?"),
        (["--model", "m", "--queue.batsh", "3"], "unknown option --queue.batsh; did you mean --queue.batch?"),
        ([], "model is required: --model or DVP_EXAMPLE__MODEL"),
        (["--model", "m", "--queue.batch", "65"], r"queue.batch: .*less than or equal to 64, got '65'"),
        (["--model", "m", "--learning-rate", "fast"], r"learning_rate: .*valid number.*, got 'fast'"),
        (["--model"], "expected one argument"),
        (["--config"], "expected one argument"),
        (["--config", "/no/such/file.toml"], "/no/such/file.toml: No such file"),
    ],
)
def test_bad_flags_are_one_clear_message(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(*argv)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DVP_EXAMPLE__MODLE", "DVP_EXAMPLE__MODLE; did you mean DVP_EXAMPLE__MODEL?"),
        ("DVP_EXAMPLE_MODEL", "DVP_EXAMPLE_MODEL; did you mean DVP_EXAMPLE__MODEL"),
        ("DVP_EXAMPLE__QUEUE__BATSH", "did you mean DVP_EXAMPLE__QUEUE__BATCH"),
        ("DVP_EXAMPLE__ZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZ", "known: DVP_EXAMPLE__CONFIG"),
    ],
)
def test_unknown_variables_are_errors(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=message):
        load("--model", "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle = 1", "unknown key 'modle'; did you mean model?"),
        ("_env_file = 'x'", "unknown key '_env_file'"),
        ("[queue]\nbatsh = 1", "unknown key queue.batsh; did you mean batch?"),
        ("model = ", "not TOML"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load("--model", "m", toml_file=write(tmp_path, text))


def test_dry_run_prints_what_load_reads_back_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(
        tmp_path,
        r"""stop = ["a\"b", "c\n\u007f\U0001F600"]
        options = { depth = 3, "a.b" = { x = [{ y = true }] } }""",
    )
    argv = ["--model", "m", "--learning-rate", "1e-7", "--token", "s3cret", "--eager", "--config", str(file)]
    argv += ["--queue.url", "redis://user:hunter2@host:1/0"]
    settings = load(*argv)
    with pytest.raises(SystemExit) as caught:
        load(*argv, "--dry-run")
    printed = capsys.readouterr().out
    assert caught.value.code == 0
    assert "s3cret" not in printed
    assert "hunter2" not in printed
    assert tomllib.loads(printed)["queue"]["url"] == "redis://user:**********@host:1/0"
    file = write(tmp_path, printed)
    secrets = ["--token", "s3cret", "--queue.url", "redis://user:hunter2@host:1/0"]
    again = load(*secrets, toml_file=file)
    assert again.model_dump(exclude={"config"}) == settings.model_dump(exclude={"config"})
    for given, missing in (
        (secrets[:2], r"queue\.url: .* --queue\.url or DVP_EXAMPLE__QUEUE__URL"),
        (secrets[2:], "token: "),
    ):
        with pytest.raises(ConfigError, match=missing):
            load(*given, toml_file=file)


@pytest.mark.parametrize("text", ["**********", "a:b@c", "?pass=x"])
def test_text_that_looks_like_a_secret_is_kept(tmp_path: Path, text: str) -> None:
    settings = load("--model", f"/models/{text}", "--stop", text)
    assert load(toml_file=write(tmp_path, settings.to_toml())) == settings


@pytest.mark.parametrize(
    "argv",
    [
        ["--rule.veto=None"],
        ["--rule.veto=None", "--rule.name=None "],
        ["--learning-rate=inf", "--rule.veto=inf"],
        ["--learning-rate=-inf", "--stop=a\u0085b\u2028"],
        ["--learning-rate=1e-300"],
    ],
)
def test_a_file_gives_back_every_value(tmp_path: Path, argv: list[str]) -> None:
    settings = load("--model", "m", *argv)
    assert load(toml_file=write(tmp_path, settings.to_toml())) == settings


def test_a_setting_can_be_unset_in_a_file(tmp_path: Path) -> None:
    settings = load("--model", "m", toml_file=write(tmp_path, '[rule]\nveto = "None"\nname = "None"\n'))
    assert settings.rule == Rule(veto=None, name="None")


def test_tokens_that_were_masked_are_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a-token-that-is-long-enough-for-this-service"
    file = write(tmp_path, MonitorSettings.load(["--token", token]).to_toml())
    with pytest.raises(ConfigError, match=r"token: its secret was masked .* --token or DVP_MONITOR__TOKEN"):
        MonitorSettings.load([], file)
    monkeypatch.setenv("DVP_MONITOR__TOKEN", token)
    assert MonitorSettings.load([], file).token[0].get_secret_value() == token


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("token", "token = 123456"),
        ("queue.password", "queue.password = 123456"),
        ("queue", "queue = 123456"),
    ],
)
def test_a_bad_secret_is_not_repeated(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load("--model", "m", toml_file=write(tmp_path, text))
    assert f"{name}: Input should be" in str(caught.value)
    assert "123456" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:hunter2@host:1/0", "redis://user:**********@host:1/0"),
        ("redis://:hunter2/with?odd#parts@host:1/0", "redis://:**********@host:1/0"),
        ("redis://host:1/0?password=hunter2&db=1", "redis://host:1/0?password=**********&db=1"),
        ("redis:/:hunter2@host", "redis:/:**********@host"),
        ("redis:///:hunter2@host", "redis:///:**********@host"),
        ("redis://us/er:hun ter2@host", "redis://us/er:**********@host"),
        ("user:hunter2@host", "user:**********@host"),
        ("rediss://host/0?ssl_password=hun'ter2&db=1", "rediss://host/0?ssl_password=**********&db=1"),
        ("http://host:1/traces?api_key=hunter2&x=1", "http://host:1/traces?api_key=**********&x=1"),
        ("rediss://host:1/0?ssl_keyfile=key.pem", "rediss://host:1/0?ssl_keyfile=key.pem"),
        ("redis://host:1/0", "redis://host:1/0"),
        ("http://host:8000/path", "http://host:8000/path"),
    ],
)
def test_passwords_of_urls_are_masked(url: str, shown: str) -> None:
    assert masked(url) == shown


def test_a_dictionary_or_list_of_the_wrong_form_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^options: expected NAME=VALUE or a JSON object"):
        load("--model", "m", "--options", "x")
    monkeypatch.setenv("DVP_EXAMPLE__OPTIONS", "x=1")
    with pytest.raises(ConfigError, match=r"^DVP_EXAMPLE__OPTIONS: not JSON, which lists and dictionaries must be"):
        load("--model", "m")


def test_prose_is_kept_as_it_is(tmp_path: Path) -> None:
    """It only looks like a URL with a password; a setting that is restored must be the one that was used."""
    texts = ["Mail bob:smith@example.com", "see https://a.b/?token=abc", "https://user:hunter2@host", "**********"]
    for text in texts:
        settings = load("--model", "m", "--note", text, "--options", json.dumps({"url": text}))
        again = load(toml_file=write(tmp_path, settings.to_toml()))
        assert (again.note, again.options) == (text, {"url": text})


def test_a_refused_url_is_shown_without_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutSettings.load(["--model", "m", "--redis-url", "http://:hunter2@host:1"])
    assert "got 'http://**********@host:1'" in str(caught.value)
    for url in (":hunter2@host:1", "user:hun/ter2@host", "//:hunter2@host", "redis//:hunter2@host", "a@hunter2@host"):
        with pytest.raises(ConfigError) as caught:
            RolloutSettings.load(["--model", "m", f"--redis-url={url}"])
        assert "ter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"unrecognized arguments: redis://:\*+@host"):
        RolloutSettings.load(["--model", "m", "redis://:hunter2@host"])


def test_help_shows_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    printed = capsys.readouterr().out
    assert caught.value.code == 0
    assert "Folder of the model." in printed
    assert "--queue.batch" in printed


def test_user_errors_exit_with_two_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, user_errors("dvp-example"):
        load()
    assert caught.value.code == 2
    message = "dvp-example: error: model is required: --model or DVP_EXAMPLE__MODEL\n"
    assert capsys.readouterr().err == message


def test_what_the_machine_refuses_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, user_errors("dvp-example"):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "weights")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "dvp-example: error: [Errno 24] Too many open files: 'weights'\n"


def test_output_that_nobody_reads_ends_the_program_silently() -> None:
    program = "from dvp_rl.settings import user_errors\nwith user_errors('x'):\n    for i in range(10**6): print(i)"
    ended = subprocess.run(
        f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        env=os.environ | {"PYTHONPATH": str(SERVICES)},
        capture_output=True,
        text=True,
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("0\n", "", 141)


def test_a_mistake_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), user_errors("dvp-example"):
        tmp_path.read_text()
