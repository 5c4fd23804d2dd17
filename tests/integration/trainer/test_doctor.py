"""`dvp-train doctor`: all that would stop a run at once, its prompts as the model reads them, and nothing changed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.http import ReplicaState
from dvp_rl.settings import masked
from dvp_rl.transport import connection
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.replicas import ReplicaBeat, ReplicaRegistry
from dvp_rl.weights.folder import folder_digest
from dvp_trainer import config as settings_of_broker
from dvp_trainer import doctor
from dvp_trainer.config import TrainSettings
from dvp_trainer.doctor import Mark, count_parameters, examine
from dvp_trainer.report.sinks import read_metrics
from tests.kit.chat_templates import GEMMA
from tests.kit.models import make_model
from tests.kit.runs import HELDOUT, MODEL, TRAIN, config, replica, run_trainer, train
from tests.kit.wait import WITHIN_S, until

NOWHERE = "redis://127.0.0.1:1"
ENVIRONMENTS = "tests.integration.harness.environments"


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.1)


def examined(flags: list[str]) -> tuple[dict[str, list[str]], str]:
    """Findings by part, each after its mark, and the error at the end; "" if nothing would stop the run."""
    found: dict[str, list[str]] = {}
    try:
        for finding in examine(TrainSettings.load(flags)):
            if not isinstance(finding, str):
                found.setdefault(finding.part, []).append(f"{finding.mark} {finding.text}")
    except ConfigError as error:
        return found, str(error)
    return found, ""


async def begin(url: str, run_id: str) -> None:
    """Registers the run, as its first trainer or replica does."""
    await (await Broker.connect(url, run_id)).close()


async def keys(url: str) -> dict[bytes, bytes]:
    """All that the broker holds, as dumps by key."""
    async with await Broker.connect(url, "reader", create=False) as broker:
        return {key: await broker.redis.dump(key) for key in await broker.redis.keys()}


@pytest.mark.slow
def test_a_run_that_is_ready_is_left_as_it_is(tmp_path: Path, own_broker: EmbeddedBroker, run_id: str) -> None:
    url = own_broker.url  # on a shared broker, what another test left there may expire meanwhile
    flags = config(tmp_path, run_id, url, data__heldout=str(HELDOUT))
    asyncio.run(begin(url, run_id))
    before = asyncio.run(keys(url))
    assert before
    done = run_trainer(["doctor", *flags])
    assert done.returncode == 0, done.stdout + done.stderr
    assert asyncio.run(keys(url)) == before
    assert not (tmp_path / "run").exists()
    lines = done.stdout.splitlines()
    assert lines[0] == f"ok   run          {run_id}: 6 steps of 4 prompts with 4 samples each"
    assert f"ok   data.train   {TRAIN}: 4000 rows, 4000 different prompts" in lines
    assert f"ok   reward       {TRAIN}: rewards of the answers of 4 rows, tried as completions: 1, 1, 1, 1" in lines
    assert [line for line in lines if line.startswith("note")] == [
        "note replicas     none is alive; the run would wait for one. Start it with"
    ]
    assert lines[-1].startswith("Nothing that would stop the run was found.")
    command = next(line for line in lines if "dvp-rollout --model" in line)
    assert f"dvp-rollout --model={MODEL} --engine=transformers --device=cpu --dtype=float32 --run-id=" in command


@pytest.mark.usefixtures("no_patience")
def test_every_mistake_shows_at_once(tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_reward.py").write_text(
        "def score(completion, answer, *, prompt, extra):\n    return answer / 2"
    )
    (tmp_path / "taken").write_text("a file, not a folder")
    mistakes = {
        "data__train": str(tmp_path / "absent.jsonl"),
        "data__heldout": str(HELDOUT),
        "reward__name": "broken_reward:score",
        "model__device": "cuda:99",
        "out_dir": str(tmp_path / "taken" / "run"),
        "correction__baseline": "no_such_module:baseline",
    }
    found, error = examined(config(tmp_path, run_id, NOWHERE, **mistakes))
    assert error == "the run would stop at hooks, device, data.train, out_dir"
    assert "importing no_such_module failed" in found["hooks"][0]
    assert "FAIL model.device 'cuda:99' cannot be used: " in found["device"][0]
    assert "absent.jsonl: no such file or folder" in found["data.train"][0]
    assert found["data.heldout"][0].startswith(f"ok {HELDOUT}: 200 rows")
    assert found["reward"] == found["prompts"] == ["skip needs data.train"]
    assert f"out_dir: {tmp_path / 'taken'} is not a folder" in found["out_dir"][0]
    assert found["broker"][0].startswith("note `dvp-train` would wait for up to")
    assert "Redis at 127.0.0.1:1 does not answer" in found["broker"][0]
    assert found["replicas"] == ["skip needs the broker"]

    mistakes = {"reward__name": "broken_reward:score", "model__path": str(tmp_path / "nowhere")}
    found, error = examined(config(tmp_path, run_id, NOWHERE, **mistakes))
    assert error == "the run would stop at tokenizer, model"
    assert found["data.train"] == ["skip needs the tokenizer"]

    found, error = examined(config(tmp_path, run_id, NOWHERE, reward__name="broken_reward:score"))
    assert error == "the run would stop at reward"
    assert "failed for the answers of 4 rows" in found["reward"][0]
    assert "answer / 2" in (tmp_path / "run" / "reward_error.txt").read_text()


@pytest.mark.usefixtures("no_patience")
def test_prompts_are_shown_as_the_model_reads_them(tmp_path: Path, run_id: str) -> None:
    prompts = ["1+1=", "\x1b[2J" + "a" * 5000 + "end", "2+2="]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": text, "answer": "2"}) + "\n" for text in prompts))
    options: Mapping[str, str | None] = {
        "model__path": str(make_model(tmp_path / "model", context=5100)),
        "data__train": str(data),
        "data__shuffle": "false",
        "data__system_prompt": "Add.",
        "data__chat_template_kwargs": "enable_thinking=false",
        "sampling__max_tokens": "100",
        "reward__name": "exact_match",
    }
    flags = config(tmp_path, run_id, NOWHERE, **options)
    found, error = examined(flags)
    assert error == ""
    assert found["tokenizer"] == ["ok 96 tokens, the model's chat template"]
    assert found["data.train"][1] == "ok prompt from column 'question', answer from column 'answer'"
    sizes, answers, cut, first, second = found["prompts"]
    assert sizes == "ok 20 to 5,023 tokens, median 20, of all 3"
    assert answers == "ok answers of 2 to 2 tokens, the end token counted; sampling.max_tokens = 100"
    assert cut.startswith("note 1 of them leave less room than sampling.max_tokens = 100 in the context of 5,100")
    brief, _ = examined([*flags, "--sampling.max-tokens=1", "--data.answer-column=question"])
    assert (
        "note answers of 5 to 5,008 tokens, the end token counted; sampling.max_tokens = 1: 3 are longer and would be"
        in brief["prompts"][1]
    )
    assert first == "ok row 0, 20 tokens, answer '2':\n<unk>system<unk>Add.<user>1+1=<assistant>--"
    assert "[... 3,0" in second
    assert second.endswith("aaaend<assistant>--")
    printed = [str(finding) for finding in examine(TrainSettings.load(flags)) if not isinstance(finding, str)]
    assert "                  <unk>system<unk>Add.<user>1+1=<assistant>--" in "\n".join(printed).splitlines()
    assert not any("\x1b" in line for line in printed)


@pytest.mark.usefixtures("no_patience")
def test_plain_text_for_a_chat_model_is_pointed_out(tmp_path: Path, run_id: str) -> None:
    model = str(make_model(tmp_path / "model"))
    found, _ = examined(config(tmp_path, run_id, NOWHERE, model__path=model))
    assert (
        f"note {TRAIN}: plain text, though the model has a chat template: data.as_chat = true uses it"
        in found["data.train"]
    )
    harness = {"episodes__harness": "true", "data__chat_template_kwargs": "enable_thinking=false"}
    found, error = examined(config(tmp_path, run_id, NOWHERE, model__path=model, **harness))
    assert error == ""
    assert "plain text" not in str(found)

    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}\n')
    chats = str(tmp_path / "chats.jsonl")
    found, error = examined(config(tmp_path, run_id, NOWHERE, model__path=model, data__heldout=chats))
    assert error == ""
    assert any(f"note only one of {TRAIN} and {chats} holds chats" in line for line in found["data.heldout"])
    asked = {"data__heldout": chats, "data__as_chat": "true"}
    found, _ = examined(config(tmp_path, run_id, NOWHERE, model__path=model, **asked))
    assert "only one" not in str(found)
    assert "ok the chat template also takes enable_thinking: data.chat_template_kwargs sets them" in found["prompts"]
    asked["data__chat_template_kwargs"] = "enable_thinking=false"
    found, _ = examined(config(tmp_path, run_id, NOWHERE, model__path=model, **asked))
    assert "also takes" not in str(found)


@pytest.mark.usefixtures("no_patience")
def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path: Path, run_id: str) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(9)]
    for name, chosen in {"train": rows[:6] + rows[:2], "heldout": rows[5:] + rows[4:5] + rows[5:6]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    files = {f"data__{name}": str(tmp_path / f"{name}.jsonl") for name in ("train", "heldout")}
    model = str(make_model(tmp_path / "model"))
    flags = config(tmp_path, run_id, NOWHERE, **files, model__path=model, data__as_chat="true")
    for limit, counts in ((6, "2 of 5"), (4, "1 of 4")):
        found, error = examined([*flags, f"--evaluate.limit={limit}"])
        assert error == ""
        shared = (
            f"heldout.jsonl: {counts} different prompts are in data.train {tmp_path / 'train.jsonl'} too: the score"
        )
        assert any(line.startswith("note") and shared in line for line in found["data.heldout"])
    found, _ = examined(config(tmp_path, run_id, NOWHERE, data__heldout=str(HELDOUT)))
    assert not any(line.startswith("note") for line in found["data.heldout"])


@pytest.mark.usefixtures("no_patience")
def test_a_run_for_up_needs_no_broker(tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_of_broker, "DEFAULT_URL", NOWHERE)
    found, error = examined(config(tmp_path, run_id, NOWHERE, broker__redis_url=None))
    assert error == ""
    assert found["broker"] == [f"ok `dvp-train up` starts one, and replicas; `dvp-train` alone needs one at {NOWHERE}"]
    assert "replicas" not in found


def in_environment(tmp_path: Path, run_id: str, name: str, **changes: str | None) -> list[str]:
    """A run for `up` whose episodes are played in the environment."""
    played = {"episodes__harness": "true", "reward__name": "given", "up__environment": f"{ENVIRONMENTS}:{name}"}
    model = {"model__path": str(make_model(tmp_path / "model")), "data__shuffle": "false"}
    return config(tmp_path, run_id, NOWHERE, **{"broker__redis_url": None} | model | played | changes)


def test_an_environment_says_what_the_model_reads(tmp_path: Path, run_id: str) -> None:
    found, error = examined(in_environment(tmp_path, run_id, "Sums"))
    assert error == ""
    named, shown, rewarded = found["environment"]
    assert named == f"ok {ENVIRONMENTS}:Sums, tools: none"
    assert shown == "ok row 0, 8 tokens:\n<user>78+19=<assistant>"
    assert rewarded == "ok the answer '97' gets reward 0.5, and the episode goes on"
    assert "prompts" not in found, "the environment writes them"
    small = str(make_model(tmp_path / "small", context=8))
    found, _ = examined(in_environment(tmp_path, run_id, "Sums", model__path=small))
    assert "note row 0 fills the context of 8 tokens: its episodes cannot be played" in found["environment"]
    found, error = examined(in_environment(tmp_path, run_id, "Asking"))
    assert (error, found["environment"]) == ("", [f"ok {ENVIRONMENTS}:Asking, an agent: only a model can try it"])


def test_what_an_environment_leaves_behind_keeps_nobody_waiting(
    tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEFT_BEHIND", str(tmp_path / "pid"))
    try:
        found, error = examined(in_environment(tmp_path, run_id, "Careless"))
        left = psutil.Process(int((tmp_path / "pid").read_text()))
        assert left.is_running()
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert error == ""
    assert found["environment"][-1] == "note close: ValueError: cannot close"


def test_the_chat_template_refuses_the_second_turn(tmp_path: Path, run_id: str) -> None:
    flags = in_environment(tmp_path, run_id, "Insistent")
    (tmp_path / "model" / "chat_template.jinja").write_text(GEMMA)
    found, error = examined(flags)
    assert error == "the run would stop at environment"
    assert "would refuse row 0: messages.3: got role user, allowed: " in found["environment"][0]


@pytest.mark.parametrize(
    ("name", "changes", "refusal"),
    [
        ("Absent", {}, "has no function 'Absent'"),
        ("NoStep", {}, "the class has no method step"),
        ("Silent", {}, "messages: List should have at least 1 item"),
        ("Chatty", {}, "Chatty': step: ValueError: see: dvp-harness: error: no more sums"),
        (
            "WithTools",
            {},
            "would refuse row 0: tools: got 2 tools, allowed: null: this model's chat template calls none",
        ),
        ("Sums", {"model__path": str(MODEL)}, "would refuse row 0: messages.0: "),
        ("Sums", {"up__harness_options": '{"workrs": 3}'}, "unknown option --workrs; did you mean --workers?"),
        ("Sums", {"up__harness_options": '{"help": true}'}, "plays nothing with these options: it prints:\nusage: "),
    ],
)
def test_an_environment_that_cannot_be_played_in(
    tmp_path: Path, run_id: str, name: str, changes: dict[str, str], refusal: str
) -> None:
    found, error = examined(in_environment(tmp_path, run_id, name, **changes))
    assert error == "the run would stop at environment"
    (failed,) = found["environment"]
    assert failed.startswith("FAIL ")
    assert refusal in failed
    assert "environments may print" not in failed


def test_a_broker_that_nobody_named_stops_no_run_for_up(
    tmp_path: Path, broker_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_of_broker, "DEFAULT_URL", broker_url)
    flags = config(tmp_path, run_id, NOWHERE, broker__redis_url=None)
    found, error = examined(flags)
    assert error == ""
    assert found["replicas"][0].startswith("ok `dvp-train up` starts them; `dvp-train` alone would wait for one. Start")
    with held(broker_url, run_id):
        found, error = examined(flags)
    assert error == ""
    assert found["broker"][0].startswith("note `dvp-train up` starts one, and replicas; `dvp-train` alone would stop: ")


@contextmanager
def held(url: str, run_id: str) -> Iterator[None]:
    """The run's lease, held and renewed by a thread."""
    ready, done = threading.Event(), threading.Event()

    async def hold() -> None:
        async with await Broker.connect(url, run_id) as broker, TrainerLease(broker, "elsewhere", ttl_s=0.6).held():
            ready.set()
            await asyncio.to_thread(done.wait)

    holder = threading.Thread(target=lambda: asyncio.run(hold()))
    holder.start()
    assert ready.wait(WITHIN_S)
    try:
        yield
    finally:
        done.set()
        holder.join()


def test_the_broker_and_its_replicas(tmp_path: Path, broker_url: str, run_id: str) -> None:
    async def beat(digest: str, *, crashed_trainer: bool = False) -> None:
        async with await Broker.connect(broker_url, run_id) as broker:
            beat = ReplicaBeat("one", ReplicaState.SERVING, f"{run_id}:0:{digest}", in_flight=0)
            await ReplicaRegistry(broker).beat(beat)
            if crashed_trainer:
                await TrainerLease(broker, "crashed", ttl_s=0.6).acquire()

    flags, digest = config(tmp_path, run_id, broker_url), folder_digest(MODEL)
    asyncio.run(beat(digest))
    found, error = examined(flags)
    assert error == ""
    assert found["broker"] == [f"ok {masked(broker_url)} answers and permits what a trainer does"]
    assert found["replicas"] == [f"ok one: serving, serves {run_id}:0:{digest}"]

    with held(broker_url, run_id):
        found, error = examined(flags)
    assert error == "the run would stop at broker"
    assert f"run_id '{run_id}' is being trained by elsewhere (host" in found["broker"][0]
    assert found["replicas"] == ["skip needs the broker"]

    asyncio.run(beat("0123", crashed_trainer=True))
    found, error = examined(flags)
    assert error == "", "a crashed trainer's lease expires"
    assert "note one was started with another model folder (digest 0123, not" in found["replicas"][1]


@pytest.mark.slow
def test_a_run_that_is_resumed(tmp_path: Path, broker_url: str, run_id: str) -> None:
    out = tmp_path / "run"
    heldout: dict[str, str | None] = {
        "data__heldout": str(HELDOUT),
        "evaluate__interval": "1",
        "evaluate__limit": "4",
        "checkpoint__interval": "1",
    }
    with replica(tmp_path, run_id, broker_url):
        train(config(tmp_path, run_id, broker_url, **heldout))
    assert len(read_metrics(out / "metrics.jsonl")) == 7

    found, error = examined(config(tmp_path, run_id, broker_url, steps="9", **heldout))
    assert error == ""
    resumed, space = found["out_dir"]
    assert resumed == f"ok {out}: the run resumes after step 6 of 9"
    taken = sum(f.stat().st_size for name in ("checkpoints", "weights") for f in (out / name).rglob("*") if f.is_file())
    bound = 1e9 * float(space.split(" about ")[1].split()[0])
    assert bound / 3 < taken < bound

    found, error = examined(config(tmp_path, run_id, broker_url, **heldout))
    assert error == ""
    assert found["out_dir"][0] == f"note {out}: 6 of 6 steps are done; to train on, raise steps"
    found, error = examined(config(tmp_path, run_id, broker_url, seed="5", **heldout))
    assert error == "the run would stop at out_dir"
    assert "is not what the checkpoint of step 6 was trained on" in found["out_dir"][0]


def test_weights_of_a_model_folder(tmp_path: Path) -> None:
    """Those that Transformers would read, whatever else lies there."""
    model = make_model(tmp_path / "model")
    whole, index = model / "model.safetensors", model / "model.safetensors.index.json"
    num = count_parameters(model)
    assert abs(4 * num / whole.stat().st_size - 1) < 0.05
    (model / "consolidated.safetensors").write_bytes(b"not read")
    index.write_text("{}")
    assert count_parameters(model) == num

    whole.rename(model / "model-00001.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors", "b": "model-00001.safetensors"}}))
    assert count_parameters(model) == num
    index.write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}))
    with pytest.raises(
        ConfigError, match=r"model-00002\.safetensors is missing, which model\.safetensors\.index\.json"
    ):
        count_parameters(model)
    (model / "model-00002.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match="its weights cannot be read"):
        count_parameters(model)
    for damaged in ("{", "[]", "5", '{"weight_map": null}', '{"weight_map": ["a"]}', '{"weight_map": {"a": {}}}'):
        index.write_text(damaged)
        with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
            count_parameters(model)
    index.unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors and no model\.safetensors\.index\.json in it"):
        count_parameters(model)


def spoil_checkpoints(out: Path) -> None:
    out.mkdir()
    (out / "checkpoints").write_text("")


def spoil_weights(out: Path) -> None:
    out.mkdir()
    (out / "weights").write_text("")


def spoil_starts(out: Path) -> None:
    out.mkdir()
    (out / "starts.jsonl").write_text("{}\n")


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda out: out.symlink_to(out), "out_dir: OUT is not a folder"),
        (lambda out: out.write_text(""), "out_dir: OUT is not a folder"),
        (spoil_checkpoints, "out_dir: OUT/checkpoints is not a folder"),
        (spoil_weights, "weights.folder: OUT/weights is not a folder"),
        (spoil_starts, "OUT/starts.jsonl: line 1"),
    ],
)
def test_a_folder_that_cannot_be_used(
    tmp_path: Path, run_id: str, spoil: Callable[[Path], object], expected: str
) -> None:
    spoil(tmp_path / "run")
    found, error = examined(config(tmp_path, run_id, NOWHERE))
    assert error == "the run would stop at out_dir"
    assert found["out_dir"][0].startswith(f"FAIL {expected.replace('OUT', str(tmp_path / 'run'))}")


@pytest.mark.usefixtures("no_patience")
def test_folders_of_others_among_the_checkpoints(tmp_path: Path, run_id: str) -> None:
    (tmp_path / "run" / "checkpoints" / "step-last").mkdir(parents=True)
    assert examined(config(tmp_path, run_id, NOWHERE))[1] == ""


@pytest.mark.usefixtures("no_patience")
def test_a_model_that_is_no_causal_lm(tmp_path: Path, run_id: str) -> None:
    model = make_model(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 96, "eos_token_id": 1}))
    found, error = examined(config(tmp_path, run_id, NOWHERE, model__path=str(model), model__device="meta"))
    assert error == "the run would stop at device, model"
    assert found["model"] == [f"FAIL model folder {model}: model type t5 is not a causal LM"]


def test_a_long_wait_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dvp_trainer.patience.SILENCE_S", 0.05)
    with doctor._patient("reward"):
        until(lambda: "reward       still looking" in capsys.readouterr().err, "the wait is said")


@pytest.mark.slow
def test_a_terminal_that_lacks_characters(tmp_path: Path, run_id: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "\u00e4"}\n', encoding="utf-8")
    flags = config(
        tmp_path, run_id, "redis://127.0.0.1:1", data__train=str(tmp_path / "rows.jsonl"), reward__name="exact_match"
    )
    command, environment = [sys.executable, "-m", "dvp_trainer", "doctor"], os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "answer '\\xe4'" in done.stdout


def test_marks_are_what_the_documentation_says() -> None:
    assert list(Mark) == ["ok", "note", "skip", "FAIL"]
