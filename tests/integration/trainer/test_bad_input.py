"""A user's mistake gives one message that names the field, its value and what is allowed, no traceback, exit code 2."""

from __future__ import annotations

import asyncio
import json
import re
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dvp_rl.contract.errors import ConfigError, WeightError
from dvp_rl.http.api_tokens import ApiTokens
from dvp_rl.transport import connection
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.roles import Role
from dvp_rl.weights.registry import WeightRegistry
from dvp_trainer.config import TrainSettings
from dvp_trainer.setup import open_run
from tests.integration.weights.conftest import serving
from tests.kit.runs import config, replica, run_trainer, train, trainer_process
from tests.kit.tokens import TOKEN
from tests.kit.wait import until


def cli_refusal(flags: list[str], before: Callable[[], object] | None = None) -> str:
    """The message of the command when it refuses to run."""
    done = run_trainer(flags, before)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.partition("dvp-train: error: ")[2]


async def refusal(flags: list[str], toml_file: Path | None = None) -> str:
    """The message of a refused run inside this process, where torch is already loaded."""
    with pytest.raises((ConfigError, WeightError)) as caught:
        async with open_run(TrainSettings.load(flags, toml_file)):
            pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sampling__temperature", "0", "sampling.temperature: Input should be greater than 0, got '0'"),
        ("sampling__max_tokens", "2000000", "sampling.n x sampling.max_tokens is 8000000, at most 4194304 allowed"),
        ("sampling__log_min_p", "0.5", "sampling.log_min_p: Input should be less than or equal to 0, got '0.5'"),
        ("sampling__n", "0", "sampling.n: Input should be greater than or equal to 1, got '0'"),
        ("correction__mode", "most", "correction.mode: Input should be 'none', 'tis', 'mis' or 'unit', got 'most'"),
        ("evaluate__interval", "5", "evaluate.interval is 5 but data.heldout names no data set"),
        ("deterministic", "true", "deterministic needs batch.max_staleness = 0, got 1"),
        ("batch__updates", "5", "batch.updates is 5, but each needs at least one group: at most batch.groups = 4"),
        ("evaluate__max_tokens", "5000000", "evaluate.n x evaluate.max_tokens is 5000000, at most 4194304 allowed"),
    ],
)
async def test_settings_out_of_range(tmp_path: Path, run_id: str, name: str, value: str, expected: str) -> None:
    assert expected in await refusal(config(tmp_path, run_id, "redis://127.0.0.1:1", **{name: value}))


async def test_a_misspelt_key_names_the_closest_one(
    tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = config(tmp_path, run_id, "redis://127.0.0.1:1")
    file = tmp_path / "config.toml"
    file.write_text("[sampling]\nmin_pp = 0.1\n")
    assert "unknown key sampling.min_pp" in await refusal(flags, file)
    assert "did you mean --sampling.log-min-p" in await refusal([*flags, "--sampling.log-min-pp=-3"])
    monkeypatch.setenv("DVP_TRAIN__SAMPLING__TEMPERATUR", "1")
    message = await refusal(flags)
    assert "unknown environment variable DVP_TRAIN__SAMPLING__TEMPERATUR; did you mean" in message


async def test_files_that_are_missing_or_unusable(tmp_path: Path, run_id: str) -> None:
    async def with_data(text: str) -> str:
        file = tmp_path / "data.jsonl"
        file.write_text(text)
        return await refusal(config(tmp_path, run_id, "redis://127.0.0.1:1", data__train=str(file)))

    nowhere = str(tmp_path / "nowhere")
    message = await refusal(config(tmp_path, run_id, "redis://127.0.0.1:1", model__path=nowhere))
    assert f"model folder {nowhere}: no such folder" in message
    assert "the data set is empty" in await with_data("")
    row_1 = await with_data(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n" + json.dumps({"text": "2+2="}) + "\n")
    assert "row 1 has no prompt. Its columns are ['text']" in row_1
    assert "row 0 has no answer" in await with_data(json.dumps({"prompt": "1+1="}) + "\n")


async def test_a_broker_that_does_not_answer_in_time(
    tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.1)
    flags = config(tmp_path, run_id, "redis://:secret@127.0.0.1:1/0", broker__stall_timeout_s="0.2")
    message = await refusal(flags)
    assert "127.0.0.1:1" in message
    assert "secret" not in message


async def test_a_user_who_may_not_do_what_a_trainer_does(
    tmp_path: Path, shared_broker: EmbeddedBroker, run_id: str
) -> None:
    message = await refusal(config(tmp_path, run_id, shared_broker.url_of(Role.ROLLOUT)))
    assert "of the commands of role trainer" in message


async def test_a_reward_that_cannot_be_found(tmp_path: Path, broker_url: str, run_id: str) -> None:
    assert "allowed are math" in await refusal(config(tmp_path, run_id, broker_url, reward__name="mathh"))
    message = await refusal(config(tmp_path, run_id, broker_url, reward__name="no_such_module:reward"))
    assert "importing no_such_module failed" in message


def test_a_disk_that_is_full_while_publishing(tmp_path: Path, broker_url: str, run_id: str) -> None:
    small_files_only = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (400_000, 400_000))
    message = cli_refusal(config(tmp_path, run_id, broker_url), small_files_only)
    assert "weights.folder" in message
    assert "could not be written" in message
    assert "resume" in message
    assert not list((tmp_path / "run" / "weights").rglob("*.safetensors"))


async def test_weights_that_are_not_served_are_not_announced(
    tmp_path: Path, broker: Broker, broker_url: str, run_id: str
) -> None:
    """One dvp-weights serves a different folder from the trainer's; another requires a token that the trainer lacks."""
    no_token = config(tmp_path, run_id, "redis://127.0.0.1:1", weights__token_file=str(tmp_path / "none"))
    assert f"weights.token_file {tmp_path / 'none'}: No such file" in await refusal(no_token)
    for tokens, reason in (
        (ApiTokens(), "HTTP 404; .* serves another folder"),
        (ApiTokens([TOKEN]), "HTTP 401; weights.tok"),
    ):
        async with serving(tmp_path / "other", tokens) as port:
            message = await refusal(config(tmp_path, run_id, broker_url, weights__url=f"http://127.0.0.1:{port}"))
        assert re.search(rf"127\.0\.0\.1:{port}/v1/weights/{run_id}/weights-00000\d/.*{reason}", message)
    assert await WeightRegistry(broker).latest() is None


def test_a_second_trainer_is_refused_and_names_the_first(tmp_path: Path, broker_url: str, run_id: str) -> None:
    flags = config(tmp_path, run_id, broker_url)
    with trainer_process(flags, tmp_path / "first.log"):
        until(lambda: (tmp_path / "run" / "weights").exists(), "the first trainer's weights")
        message = cli_refusal(config(tmp_path, run_id, broker_url, "second"))
    assert f"run_id '{run_id}' is being trained by dvp-train in {tmp_path / 'run'}" in message
    assert "pid" in message


async def test_a_run_whose_data_changed_does_not_resume(tmp_path: Path, broker_url: str, run_id: str) -> None:
    with replica(tmp_path, run_id, broker_url):
        await asyncio.to_thread(train, config(tmp_path, run_id, broker_url, steps="2"))
    message = await refusal(config(tmp_path, run_id, broker_url, steps="4", seed="5"))
    assert "is not what the checkpoint of step 2 was trained on" in message
    off = config(tmp_path, run_id, broker_url, steps="4", resume="false")
    assert "holds a checkpoint of step 2 and resume is off" in await refusal(off)


async def test_a_run_without_the_checkpoints_that_it_had_says_that_it_begins_anew(
    tmp_path: Path, broker_url: str, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    words = f"no checkpoint in {tmp_path / 'run' / 'checkpoints'}: the run begins at step 0"
    for times in (0, 1):
        caplog.clear()
        async with open_run(TrainSettings.load(config(tmp_path, run_id, broker_url))):
            pass
        assert caplog.text.count(words) == times
