"""Layouts of data sets, the order of rows, and every kind of bad data set."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.http import Message
from dvp_trainer.data.prompts import Layout, Order, Prompt, Row, load_prompts, parse_row, permutation
from dvp_trainer.data.rendering import task_of
from tests.kit.wait import WITHIN_S

DAPO: dict[str, Any] = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve it.\n\nWhat is 30 + 4?", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
AIME_UPPER = {"ID": "2024-II-4", "Problem": "Find m + n.", "Solution": "Long.", "Answer": 33}
AIME_LOWER = {"id": 60, "problem": "Find m + n.", "solution": "Long.", "answer": "204", "url": "", "year": "2024"}


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: list[Any]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def numbered(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "numbered.jsonl", [{"prompt": f"{i}=", "answer": str(i)} for i in range(50)])


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize(
    ("record", "prompt", "answer", "extra"),
    [
        ({"prompt": "1+1=", "answer": "2", "level": 3}, "1+1=", "2", {"level": 3}),
        (
            DAPO,
            (Message(role="user", content="Solve it.\n\nWhat is 30 + 4?"),),
            "34",
            {name: DAPO[name] for name in ("data_source", "ability", "reward_model", "extra_info")},
        ),
        (AIME_UPPER, "Find m + n.", "33", {"ID": "2024-II-4", "Solution": "Long."}),
        (AIME_LOWER, "Find m + n.", "204", {"id": 60, "solution": "Long.", "url": "", "year": "2024"}),
        ({"question": "1+1?", "ground_truth": 2.0}, "1+1?", "2", {}),
        ({"prompt": "1/2?", "answer": 0.5}, "1/2?", "0.5", {}),
        ({"prompt": "both?", "answer": ["a", "ü"]}, "both?", '["a", "ü"]', {}),
        ({"prompt": "1+1="}, "1+1=", None, {}),
    ],
)
def test_layouts_are_recognised(
    tmp_path: Path, write: Any, record: dict[str, Any], prompt: Prompt, answer: str | None, extra: dict[str, Any]
) -> None:
    source = write(tmp_path / f"rows.{'jsonl' if write is write_jsonl else 'parquet'}", [record])
    row = load_prompts(source).row_at(0)
    assert (row.index, row.prompt, row.answer, row.extra) == (0, prompt, answer, extra)


def test_rows_keep_the_answers_original_value(tmp_path: Path) -> None:
    """A reward written for TRL gets columns as they are in the file."""
    row = load_prompts(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "answer": 2, "level": 3}])).row_at(0)
    assert (row.answer, row.answer_column, row.columns) == ("2", "answer", {"answer": 2, "level": 3})


@pytest.mark.parametrize("answered", [0, 1])
def test_rows_without_answers_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture, answered: int) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}] * answered + [{"prompt": "2+2="}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    with caplog.at_level("INFO"):
        load_prompts(source)
    rows_read, unanswered = caplog.messages
    assert rows_read == f"{source}: {len(rows)} rows, {len(rows)} different prompts"
    assert unanswered.startswith(
        f"{source}: row {answered} has no answer. Its columns are ['prompt'], looked for ['rew"
    )
    assert unanswered.endswith(f"data.answer_column. The reward gets None there, as in 1 of {len(rows)} rows")


def test_messages_with_several_turns(tmp_path: Path) -> None:
    turns = [{"role": role, "content": text} for role, text in [("system", "Be brief."), ("user", "1+1?")]]
    row = load_prompts(write_jsonl(tmp_path / "chat.jsonl", [{"messages": turns}])).row_at(0)
    assert row.prompt == tuple(Message(**turn) for turn in turns)
    assert row.text == "Be brief.\n\n1+1?"


def test_text_becomes_a_chat(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1+1?"}])
    user, system = Message(role="user", content="1+1?"), Message(role="system", content="Be brief.")
    assert load_prompts(source).row_at(0).prompt == "1+1?"
    assert load_prompts(source, layout=Layout(as_chat=True)).row_at(0).prompt == (user,)
    row = load_prompts(source, layout=Layout(system_prompt="Be brief.")).row_at(0)
    assert (row.prompt, row.text) == ((system, user), "Be brief.\n\n1+1?")


def test_a_system_prompt_begins_every_chat(tmp_path: Path) -> None:
    question, own = ({"role": role, "content": role} for role in ("user", "system"))
    source = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [question]}, {"messages": [own, question]}])
    layout = Layout(system_prompt="")
    assert [m.role for m in load_prompts(source, limit=1, layout=layout).row_at(0).prompt] == ["system", "user"]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"row 1, messages: has a system message, and data\.system_prompt is set"):
        load_prompts(source, layout=layout)


def test_explicit_columns_win_and_reach_into_nested_ones(tmp_path: Path) -> None:
    record = {"prompt": "wrong", "answer": "wrong", "task": {"text": "right"}, "key.with.dots": "4"}
    source = write_jsonl(tmp_path / "rows.jsonl", [record])
    row = load_prompts(source, layout=Layout(prompt="task.text", answer="key.with.dots")).row_at(0)
    assert (row.prompt, row.answer) == ("right", "4")


@pytest.mark.parametrize("rows", [1, 5000])
def test_a_parquet_file_reads_as_the_same_rows(tmp_path: Path, rows: int) -> None:
    records = [{"prompt": f"{i}=", "answer": str(i)} for i in range(rows)]
    prompts = load_prompts(write_parquet(tmp_path / "rows.parquet", records), order=Order.SEQUENTIAL)
    assert [row.answer for row in prompts] == [str(i) for i in range(rows)]
    assert prompts.row_at(rows - 1).answer == str(rows - 1)


def test_folders_of_datasets(tmp_path: Path) -> None:
    import datasets

    train = datasets.Dataset.from_list([DAPO] * 3)
    train.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": train, "test": train.select([0])}).save_to_disk(str(tmp_path / "two"))
    assert load_prompts(str(tmp_path / "one")).row_at(0).answer == "34"
    assert len(load_prompts(str(tmp_path / "two"))) == 3
    assert len(load_prompts(str(tmp_path / "two"), split="test")) == 1
    with pytest.raises(ConfigError, match=r"no split 'dev'; the data set has \['test', 'train'\]"):
        load_prompts(str(tmp_path / "two"), split="dev")


# --- order ------------------------------------------------------------------------------------------------------------


def test_every_epoch_has_every_row_once_in_another_order(numbered: str) -> None:
    prompts = load_prompts(numbered, seed=3)
    epochs = [[prompts.row_at(epoch * 50 + i).index for i in range(50)] for epoch in range(3)]
    assert all(Counter(epoch) == Counter(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_is_a_function_of_seed_and_position(numbered: str) -> None:
    first, again, other = (load_prompts(numbered, seed=seed) for seed in (3, 3, 4))
    positions = [149, 0, 75, 12]
    assert [first.row_at(p) for p in positions] == [again.row_at(p) for p in reversed(positions)][::-1]
    assert [first.row_at(p) for p in range(50)] != [other.row_at(p) for p in range(50)]


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 2), (2**63 - 1, 10**6)])
def test_the_permutation_is_that_of_whole_number_arithmetic(seed: int, epoch: int) -> None:
    key = splitmix64((splitmix64(seed) + epoch) % 2**64)
    assert permutation(100, seed, epoch).tolist() == sorted(range(100), key=lambda row: splitmix64(row + key))


def test_the_permutation_never_changes_between_releases() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the first output of the published generator from state 0
    assert permutation(10, 0, 0).tolist() == [4, 8, 0, 1, 7, 6, 2, 5, 3, 9]


def test_rows_land_everywhere_equally_often() -> None:
    """Over 600 epochs, each of 6 rows is expected 100 times in each of 6 places; five standard deviations are 46."""
    orders = [permutation.__wrapped__(6, 11, epoch).tolist() for epoch in range(600)]
    counts = Counter((place, row) for order in orders for place, row in enumerate(order))
    assert all(abs(counts[place, row] - 100) < 46 for place in range(6) for row in range(6))


def test_sequential_order_wraps_around(numbered: str) -> None:
    prompts = load_prompts(numbered, order=Order.SEQUENTIAL)
    assert [prompts.row_at(p).index for p in (0, 49, 50, 101)] == [0, 49, 0, 1]


def test_the_fingerprint_tells_data_order_and_seed_apart(numbered: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}=", "answer": str(i)} for i in range(49)] + [{"prompt": "49=", "answer": "50"}]
    changed = write_jsonl(tmp_path / "changed.jsonl", rows)
    loaded = [
        load_prompts(numbered),
        load_prompts(numbered, seed=1),
        load_prompts(numbered, order=Order.SEQUENTIAL),
        load_prompts(numbered, limit=49),
        load_prompts(changed),
        load_prompts(numbered, rendering="[true]"),
        load_prompts(numbered, layout=Layout(system_prompt="")),
    ]
    assert len({prompts.fingerprint for prompts in loaded}) == len(loaded)
    assert load_prompts(numbered).fingerprint == loaded[0].fingerprint


def test_limit_takes_the_first_rows(numbered: str) -> None:
    prompts = load_prompts(numbered, limit=7)
    assert sorted(prompts.row_at(p).index for p in range(7)) == list(range(7))
    assert len(load_prompts(numbered, limit=1000)) == 50


def test_long_prompts_are_left_out_and_counted(numbered: str, caplog: pytest.LogCaptureFixture) -> None:
    def count(row: Row) -> int:
        return len(row.prompt)

    with caplog.at_level(logging.INFO):
        prompts = load_prompts(numbered, max_prompt_tokens=2, count_tokens=count, order=Order.SEQUENTIAL)
    assert [row.index for row in prompts] == list(range(10))
    assert "10 rows, 10 different prompts, 40 left out" in caplog.text
    with pytest.raises(ConfigError, match=r"no prompt is left: 50 are longer than data\.max_prompt_tokens = 1,"):
        load_prompts(numbered, max_prompt_tokens=1, count_tokens=count)


def test_prompts_that_fill_the_context_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each would become a dead letter: no replica has room for a token of its answer."""
    lengths = (2, 9, 10, 11, 3)
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1" * length, "answer": "1"} for length in lengths])
    prompts = load_prompts(source, context=10, count_tokens=lambda row: len(row.prompt))
    assert [len(row.text) for row in prompts] == [2, 9, 3]
    assert f"{source}: 2 of 5 prompts are left out: they fill the model's context of 10 tokens" in caplog.text
    assert len(load_prompts(source, context=10, max_prompt_tokens=2, count_tokens=lambda row: len(row.prompt))) == 1
    with pytest.raises(ConfigError, match="and 5 fill the model's context of 2 tokens"):
        load_prompts(source, context=2, count_tokens=lambda row: len(row.prompt))


def test_only_prompts_that_may_fill_the_context_are_counted_in_tokens(tmp_path: Path) -> None:
    counted: list[int] = []

    def count(row: Row) -> int:
        counted.append(len(row.prompt))
        return counted[-1]

    rows = [{"prompt": letter * 2000, "answer": "1"} for letter in "aä"] + [{"prompt": "c" * 5000, "answer": "1"}]
    load_prompts(write_jsonl(tmp_path / "rows.jsonl", rows), context=6000, count_tokens=count)
    assert counted == [5000]
    load_prompts(write_jsonl(tmp_path / "rows.jsonl", rows), context=5000, count_tokens=count)
    assert counted == [5000, 2000, 5000], "two bytes a letter"


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "1+1=", "answer": "2"},
            r"row 1 has no prompt. Its columns are \['answer', 'text'\], looked for \['pro",
        ),
        ({"prompt": None, "answer": "2"}, "row 1 has no prompt"),
        ({"prompt": "", "answer": "2"}, "row 1 has no prompt"),
        ({"prompt": [], "answer": "2"}, "row 1 has no prompt"),
        ({"prompt": 5, "answer": "2"}, "row 1, prompt: expected text or a list of chat messages, got int"),
        ({"prompt": ["a"], "answer": "2"}, "row 1, prompt: expected text or a list of chat messages, got list"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, "row 1, prompt: content"),
        ({"prompt": [{"role": "assistant", "content": "2"}], "answer": "2"}, "the last message is the assistant's"),
        ({"prompt": "1+1="}, r"row 1 has no answer. Its columns are \['prompt'\], looked for \['reward_model.ground"),
        ({"prompt": "1+1=", "answer": None}, "row 1 has no answer"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "0+0=", "answer": "0"}, row])
    with pytest.raises(ConfigError, match=message) as caught:
        load_prompts(source, needs_answer=True)
    assert source in str(caught.value)


def test_a_wrong_column_name_is_named(numbered: str) -> None:
    with pytest.raises(ConfigError, match=r"looked for \['promt'\].*data.prompt_column"):
        load_prompts(numbered, layout=Layout(prompt="promt"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "the data set is empty"),
        ("blank.jsonl", b"\n\n", "the data set is empty"),
        ("broken.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ("list.jsonl", b"[1]\n", "line 1 is a JSON list"),
        ("latin.jsonl", b'{"prompt": "\xe4"}\n', "not UTF-8"),
        ("rows.csv", b"prompt,answer\n", "unknown format '.csv'; allowed are .jsonl and .parquet"),
        ("rows", b"", "unknown format 'without suffix'"),
        ("broken.parquet", b"PAR1 and so on", "not a readable parquet file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_prompts(str(path))
    assert str(path) in str(caught.value)


def test_an_empty_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(ConfigError, match="the data set is empty"):
        load_prompts(str(path))


def test_a_missing_path_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no such file or folder. Allowed: a .jsonl or .parquet file.*hub:owner/name"
    ):
        load_prompts(str(tmp_path / "absent"))


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read this folder"):
        load_prompts(str(tmp_path))


def test_the_hub_is_not_asked_when_offline() -> None:
    """Runs in a separate process, because `datasets` reads HF_HUB_OFFLINE when it is imported."""
    program = "from dvp_trainer.data.prompts import load_prompts; load_prompts('hub:nobody/no-such-data')"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert "ConfigError: hub:nobody/no-such-data: `datasets` cannot load split 'train'" in ended.stderr
    assert "without network, download it first" in ended.stderr


def test_a_row_becomes_a_task_of_plain_json() -> None:
    when = date(2026, 1, 2)
    columns = {"answer": 7, "level": np.int64(3), "ids": np.arange(2), "when": when, "score": math.nan, "none": None}
    row = parse_row({"messages": [{"role": "user", "content": "say it"}]} | columns, 5, "here")
    assert task_of(row, "here") == {
        "row": 5,
        "prompt": [{"role": "user", "content": "say it"}],
        "answer": "7",
        "columns": {"level": 3, "ids": [0, 1], "when": "2026-01-02", "score": None, "none": None},
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [("\ud800", "surrogates not allowed"), ("x" * 2**20, "at most 1048576 bytes as JSON"), (2**64, "plain JSON")],
)
def test_a_row_that_no_harness_can_get_is_named(value: object, message: str) -> None:
    row = parse_row({"prompt": "say it", "column": value}, 5, "here")
    with pytest.raises(ConfigError, match=f"here: row 5 cannot be sent to a harness: .*{message}"):
        task_of(row, "here")
