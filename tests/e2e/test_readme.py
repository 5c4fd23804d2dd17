"""Runs every code block of README.md (pages.py says how)."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from dvp_rl.transport.broker import Broker

from .pages import Block, Reader, read_blocks
from .stack import REPOSITORY

BLOCKS = read_blocks((REPOSITORY / "README.md").read_text())
SLOW = [block for block in BLOCKS if block.is_slow]
FAST = [block for block in BLOCKS if not block.is_slow]
SHORTER = {
    # test_demo.py runs both to their ends.
    "make demo": "ARGS=--steps=12",
    'make demo ARGS="--task calculator"': "'ARGS=--task calculator --steps=12'",
    "make test": "ARGS=--collect-only",  # a test that ran all tests would run itself
}


async def make_run(broker_url: str, run_id: str) -> None:
    """Registers the run, as its first trainer or replica does."""
    await (await Broker.connect(broker_url, run_id)).close()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, broker_url: str) -> Iterator[Reader]:
    asyncio.run(make_run(broker_url, "qwen3-math"))
    urls = {f"DVP_{name}__REDIS_URL": broker_url for name in ("QUEUE", "MONITOR")}
    reader = Reader(BLOCKS, tmp_path_factory.mktemp("reader"), urls)
    yield reader
    reader.close()


@pytest.mark.parametrize("block", FAST, ids=lambda block: block.name)
def test_block(reader: Reader, block: Block) -> None:
    reader.run(block)


@pytest.mark.slow
@pytest.mark.parametrize("block", SLOW, ids=lambda block: block.name)
def test_slow_block(reader: Reader, block: Block) -> None:
    if not block.text.startswith("make "):
        reader.run(block)
        return
    # Options of this run (`make test-slow ARGS=...`) are not for that one.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "ARGS")
    }
    command = shlex.split(f"{block.text} {SHORTER.get(block.text.strip(), '')}")
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_reward_of_the_page_works(reader: Reader) -> None:
    block = next(block for block in BLOCKS if block.file == "my_rewards.py")
    names: dict[str, object] = {}
    exec(block.text, names)
    assert names["brief"]("95", "95", prompt="37+58=", extra={}) == pytest.approx(0.998)  # type: ignore[operator]


@pytest.mark.parametrize(
    "text",
    [
        "```\nls\n```\n",
        "```sh\nls\n```\n",
        "```bash\nfalse\n```\n",
        "```python\n1 / 0\n```\n",
        "```bash\necho 12 apples\n```\n```text prints\n9 pears\n```\n",
        "```bash\necho 12 apples\n```\n```text prints\n9 appl\n```\n",
        "```bash\necho a; echo b\n```\n```text prints\nb\na\n```\n",
        "```bash\necho a; echo b; echo c\n```\n```text prints\na\nc\n```\n",
        "```bash\necho a\n```\n```text prints\na\na\n```\n",
        "```bash\necho 1,2,3\n```\n```text prints\n1,2\n```\n",
        "```python\nprint(1)\n```\n```text prints\n1\n```\n",
    ],
)
def test_block_that_is_not_run_or_fails_fails(reader: Reader, text: str) -> None:
    (block,) = read_blocks(text)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        reader.run(block)


def test_what_a_block_prints(reader: Reader) -> None:
    (block,) = read_blocks(
        "```bash\necho; echo step 7 of 12; echo a; echo -2.5 apples\n```\nsays\n"
        "```text prints\nstep 3…\n…\n0 apples\n```\nand\n```text prints\nstep 4 of 4,000\na\n```\n"
    )
    reader.run(block)
