"""The demo's second task: what its model learned from is what its environment and its chat template say."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.calculator.environment import COST_OF_ERROR, Calculator
from deploy.demo.calculator.make_model import END, NUM_HELDOUT, NUM_TRAIN, TOOL, Task, Teacher, make_tasks
from dvp_rl.engines.tokenizer import Tokenizer, load_tokenizer
from dvp_rl.engines.tool_calls import ToolFormat, tool_format

FOLDER = Path(__file__).parents[2] / "deploy/demo/calculator"
PERFECT = Teacher(wrong_tool=0, guess=0, slip=0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(FOLDER / "model")


@pytest.fixture(scope="module")
def calls(tokenizer: Tokenizer) -> ToolFormat:
    found = tool_format(
        lambda messages, tools, prompt: tokenizer.render(messages, {}, tools, add_generation_prompt=prompt), [END]
    )
    assert found is not None
    return found


def answers(teacher: Teacher, task: Task, rng: random.Random, calls: ToolFormat) -> tuple[list[dict[str, Any]], str]:
    """(what the teacher says, as messages of the assistant; the whole episode)."""
    parts = teacher.episode(task, rng)
    messages = []
    for part in parts:
        if part.drawn:
            content, found = calls.parse(part.text.removesuffix(END))
            made = [{"id": "1", "function": {"name": call.name, "arguments": call.arguments}} for call in found]
            messages.append({"role": "assistant", "content": content, "tool_calls": made})
    return messages, "".join(part.text for part in parts)


async def play(task: Task, said: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """(the conversation, its reward)."""
    environment = Calculator()
    conversation = environment.reset({"prompt": task.prompt, "answer": str(task.answer)})
    total = 0.0
    for message in said:
        step = await environment.step(message)
        total += step.reward or 0.0
        conversation += [message, *step.messages]
        assert step.done == (message is said[-1])
    return conversation, total


@pytest.mark.parametrize("teacher", [PERFECT, Teacher(), Teacher(1.0, 0.0, 0.5)])
def test_the_teacher_writes_what_the_chat_template_renders(
    teacher: Teacher, tokenizer: Tokenizer, calls: ToolFormat
) -> None:
    rng = random.Random(0)
    for task in make_tasks(200, rng):
        said, episode = answers(teacher, task, rng, calls)
        conversation, reward = asyncio.run(play(task, said))
        for message in conversation:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        assert tokenizer.render(conversation, {}, None, add_generation_prompt=False) == episode
        assert tokenizer.decode(tokenizer.encode(episode), skip_special_tokens=False) == episode
        errors = episode.count(f"{TOOL}error")
        assert reward == float(said[-1]["content"] == str(task.answer)) - COST_OF_ERROR * errors
        if teacher is PERFECT:
            assert (reward, len(said)) == (1.0, len(task.numbers))


def test_no_held_out_task_is_trained_on() -> None:
    train, heldout = (
        [json.loads(line)["prompt"] for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert (len(train), len(heldout)) == (NUM_TRAIN, NUM_HELDOUT)
    assert len({*train, *heldout}) == NUM_TRAIN + NUM_HELDOUT
