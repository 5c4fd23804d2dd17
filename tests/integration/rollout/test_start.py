"""A user's mistake at start: exit code 2, one message with field, value and remedy, no traceback."""

from __future__ import annotations

import logging
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.http.server import bound, port_file
from dvp_rl.loopback import is_loopback
from dvp_rl.rollout.__main__ import main
from tests.kit.processes import run
from tests.kit.replicas import COMMAND
from tests.kit.tokens import TOKEN


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(args)
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("dvp-rollout: error: ")
    return printed.err


@pytest.mark.parametrize(
    ("args", "variables", "message"),
    [
        (["--model", "/no/such/folder"], {}, "/no/such/folder: no such folder"),
        (["--model", "m", "--sglang.extra-args", "'a"], {}, "sglang.extra_args: No closing quotation"),
        (
            ["--model", "m", "--engine", "tgi"],
            {},
            "engine: allowed are transformers, sglang, vllm, fake, or your own as",
        ),
        (["--model", "m", "--redis-ulr", "x"], {}, "unknown option --redis-ulr; did you mean --redis-url"),
        (["--model", "m", "--redis-url", "http://x"], {}, "redis_url: must start with redis://"),
        (
            ["--model", "m", "--host", "0.0.0.0"],
            {},
            "'0.0.0.0' is reachable from other machines: name a token_folder, set a token",
        ),
        (["--model", "m", "--port", "70000"], {}, "port: Input should be less than or equal to 65535, got '70000'"),
        (["--model", "m", "--token-folder", "/no/tokens"], {}, "token_folder: '/no/tokens': No such file or directory"),
        (
            ["--model", "m"],
            {"DVP_ROLLOUT__TOKEN": "change-me"},
            "token: a token has 9 characters, at least 16 are needed",
        ),
        (
            ["--model", str(Path(__file__).parent), "--weights.token-file", "/no/token"],
            {},
            "weights.token_file /no/token: No such file",
        ),
        ([], {}, "model is required: --model or DVP_ROLLOUT__MODEL"),
        (["--model", "m"], {"DVP_ROLLOUT__PROT": "1"}, "DVP_ROLLOUT__PROT; did you mean DVP_ROLLOUT__PORT"),
    ],
)
def test_mistakes_are_explained(
    args: list[str],
    variables: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert message in refused(capsys, *args)


def test_a_bad_key_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rollout.toml"
    file.write_text('model = "m"\nmax_bath = 3\n')
    assert "unknown key 'max_bath'; did you mean max_batch" in refused(capsys, "--config", str(file))


def test_a_busy_port_is_named_before_the_model_is_loaded(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run([*COMMAND, "--model", str(model), "--port", str(port)])
    assert done.returncode == 2
    message = f"port {port} on 127.0.0.1 cannot be used: Address already in use; choose another --port, or 0"
    assert done.stderr.startswith(f"dvp-rollout: error: {message}")


def test_a_folder_without_a_model_ends_the_server_that_was_already_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--model", str(tmp_path), "--engine", "fake", "--port", "0"])
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"dvp-rollout: error: model folder {tmp_path}: no config.json")


def test_dry_run_prints_everything_and_starts_nothing() -> None:
    variables = {"DVP_ROLLOUT__PORT": "9000", "DVP_ROLLOUT__RUN_ID": "r"}
    done = run([*COMMAND, "--model", "m", "--token", TOKEN, "--dry-run"], **variables)
    assert done.returncode == 0
    assert TOKEN not in done.stdout
    printed = tomllib.loads(done.stdout)
    assert (printed["model"], printed["port"], printed["run_id"], printed["fake"]["num_tokens"]) == ("m", 9000, "r", 32)


def test_a_bound_port_is_closed_to_others_and_zero_is_free() -> None:
    with bound("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        with pytest.raises(ConfigError, match=f"port {port}"), bound("127.0.0.1", port):
            pass
    with bound("127.0.0.1", port):
        pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.1.1"])
def test_a_host_that_is_none(host: str) -> None:
    with pytest.raises(ConfigError, match=host), bound(host, 0):
        pass


def test_the_port_file_is_whole_and_goes_away(tmp_path: Path) -> None:
    file = tmp_path / "port"
    with bound("127.0.0.1", 0) as listener:
        with port_file(file, listener):
            assert int(file.read_text()) == listener.getsockname()[1]
            assert list(tmp_path.iterdir()) == [file]
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ConfigError, match="port_file"), port_file(tmp_path / "no" / "port", listener):
            pass


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *[(host, True) for host in ("localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]")],
        *[(host, False) for host in ("0.0.0.0", "::", "", "localhost.evil.example", "10.1.1.1", "127.1")],
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
