"""Sampled tokens are never tokenised again: a session's model reads the ids it drew, and these are trained."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dvp_rl.contract.errors import RequestError
from dvp_rl.contract.generate import GenerateRequest
from dvp_rl.contract.group import EngineFacts, FinishReason, Group, Sample, VersionSpan
from dvp_rl.contract.job import Sink
from dvp_rl.contract.openai import ChatRequest, CompletionRequest
from dvp_rl.contract.sampling import Sampling
from dvp_rl.contract.session import Ending, Fork, Session, Turn, branches, digest, episode, group_of, history, path
from dvp_rl.engines.tokenizer import Tokenizer
from dvp_rl.engines.tool_calls import ToolCall
from dvp_rl.rollout.dialogue import Answer, Dialogue, Prompt, TurnRequest
from tests.kit.chat_templates import CHATS, PLAIN, SPECIALS, make_chat_tokenizer

RUN = "run"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
WITH_TOOLS = ("qwen25", "qwen3", "llama31", "mistral")
THOUGHT = "<think>\nthe tool\n</think>\n\n"
Message = dict[str, Any]


def _byte_chars() -> list[str]:
    """The character that a byte-level tokenizer writes for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


BYTE_CHARS = _byte_chars()


@cache
def tokenizer_of(chat: str) -> Tokenizer:
    core = make_chat_tokenizer(CHATS[chat])
    end = core.convert_tokens_to_ids(CHATS[chat].end)
    assert isinstance(end, int)
    assert isinstance(core.pad_token_id, int)
    return Tokenizer(eos_ids=frozenset({end}), pad_id=core.pad_token_id, vocab_size=len(core), core=core)


@cache
def dialogue_of(chat: str) -> Dialogue:
    return Dialogue(tokenizer_of(chat))


def user(content: str = "the question") -> Message:
    return {"role": "user", "content": content}


def result(call_id: str, content: str = "3") -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def asked(messages: Sequence[Message], *, tools: bool = False, **fields: Any) -> ChatRequest:
    return ChatRequest(model=RUN, messages=messages, tools=TOOLS if tools else None, **fields)


@dataclass(frozen=True)
class Said:
    turn: Turn
    prompt: Prompt
    answer: Answer
    index: int

    @property
    def echo(self) -> Message:
        """The answer as OpenAI's clients send it back."""
        calls = [
            {"id": call.call_id or f"c{self.index:04d}{at:04d}", "type": "function"}
            | {"function": {"name": call.name, "arguments": call.arguments}}
            for at, call in enumerate(self.answer.calls)
        ]
        content = self.answer.content or (None if calls else "")
        message = {"role": "assistant", "content": content, "tool_calls": calls or None}
        return {key: value for key, value in message.items() if value is not None}


class Player:
    """Plays a session as `Sessions.turn` does, with drawn tokens that are given."""

    def __init__(self, chat: str, **fields: Any) -> None:
        self.tokenizer = tokenizer_of(chat)
        self.dialogue = dialogue_of(chat)
        self.end = CHATS[chat].end
        self.session = Session(session_id="session", run_id=RUN, **fields)
        self.turns: list[Turn] = []
        self.reads: list[NDArray[np.int32]] = []
        """What the model read for each turn."""

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode_rest(text)

    def split(self, text: str) -> list[int]:
        """The text one token a byte, which is canonical for no merge. Tokens with names stay whole."""
        parts = re.split(f"({'|'.join(map(re.escape, (*SPECIALS, *PLAIN)))})", text)
        return [
            token_id
            for at, part in enumerate(parts)
            for token_id in (self.ids(part) if at % 2 else self.bytes(part.encode()))
        ]

    def bytes(self, data: bytes) -> list[int]:
        ids = self.tokenizer.core.convert_tokens_to_ids([BYTE_CHARS[byte] for byte in data])
        return list(ids)

    def text(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        return self.tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=False)

    def say(self, request: TurnRequest, ids: Sequence[int], *, check: bool = True) -> Said:
        """`check`: whether all text is that of its tokens, as it is unless a turn ends within a character."""
        prompt = self.dialogue.prompt(self.session, self.turns, request)
        index, drawn_ids = len(self.turns), np.asarray(ids, np.int32)
        answer = self.dialogue.answer(prompt.token_ids, drawn_ids, request, self.session)
        sample = Sample(
            token_ids=drawn_ids,
            logprobs=np.full(len(ids), -1.0 - index, np.float32),
            kept_mass=np.ones(len(ids), np.float32),
            kept_count=np.full(len(ids), 2, np.int32),
            finish_reason=FinishReason.STOP,
            versions=(VersionSpan(version=f"run:{index}:weights", start=0, end=len(ids)),),
            seed=0,
        )
        group = Group(
            job_id="job",
            run_id=RUN,
            prompt_ids=prompt.token_ids,
            sampling=self.session.sampling,
            samples=(sample,),
            sink=Sink.CLIENT,
            replica_id="replica-0",
            engine=EngineFacts(name="player", version="1", dtype="float32"),
            finished_at=float(index),
        )
        turn = self.dialogue.turn(f"turn-{index}", prompt, group, answer)
        if check:
            self.check_turn(turn, prompt)
        self.turns.append(turn)
        self.reads.append(prompt.token_ids)
        return Said(turn, prompt, answer, index)

    def check_turn(self, turn: Turn, prompt: Prompt) -> None:
        """The model reads recorded ids up to the longest beginning that is recorded, and the rest of the text after."""
        recorded = history(path(self.turns, turn.parent))
        assert prompt.token_ids.tolist() == [*recorded.tolist(), *turn.context_ids.tolist()]
        drawn = turn.sample.token_ids
        texts = [
            self.text([*read.tolist(), *other.sample.token_ids.tolist()])
            for read, other in zip(self.reads, self.turns, strict=True)
        ]
        beginning = "" if turn.parent is None else texts[turn.parent]
        asked = beginning + prompt.text
        assert len(beginning) == max((len(text) for text in texts if asked.startswith(text)), default=0)
        assert self.text(turn.context_ids) == prompt.text
        assert self.text(prompt.token_ids) == asked
        added = self.text([*prompt.token_ids.tolist(), *drawn.tolist()]).removeprefix(beginning)
        assert (turn.num_chars, turn.text_digest) == (len(added), digest(added))
        goes_on = not self.turns or (
            turn.parent is not None and all(other.parent != turn.parent for other in self.turns)
        )
        assert (turn.fork is None) == goes_on

    def check_episode(self) -> None:
        """Samples hold each drawn token once, as the model's, after exactly what the model read for it."""
        found, samples = branches(self.turns), episode(self.turns)
        assert sorted(index for branch in found for index in branch) == list(range(len(self.turns)))
        for branch, sample in zip(found, samples, strict=True):
            prompt = sample.continues(self.turns[0].context_ids)
            ids = [*prompt.tolist(), *sample.token_ids.tolist()]
            from_model = np.zeros(len(ids), bool)
            drawn_by = np.full(len(ids), -1)
            end = 0
            for index in branch:
                read, drawn = self.reads[index].tolist(), self.turns[index].sample.token_ids.tolist()
                start, end = len(read), len(read) + len(drawn)
                assert ids[:start] == read
                assert ids[start:end] == drawn
                assert not from_model[start:end].any()
                from_model[start:end], drawn_by[start:end] = True, index
            assert end == len(ids)
            assert from_model[: len(prompt)].sum() == 0
            inside = drawn_by[len(prompt) :]
            assert sample.is_model.tolist() == from_model[len(prompt) :].tolist()
            assert sample.logprobs.tolist() == [-1.0 - index for index in inside if index >= 0]
            for span in sample.versions:
                assert {f"run:{index}:weights" for index in inside[span.start : span.end]} == {span.version}
            for before, after in pairwise(branch):
                assert self.turns[after].parent == before
            assert [self.turns[index].fork is None for index in branch] == [
                index == 0 or at > 0 for at, index in enumerate(branch)
            ]
        if self.turns:
            assert group_of(self.session, self.turns, Ending()).samples == samples


# Dialogues at random.

WORDS = st.text(st.sampled_from('the tool: in"}\n é€😀<|>'), max_size=8)
CALLS = (
    '{"name": "add", "%s": {"a": 1}}',
    '{"name":"add","%s":{"a":"the \\u00e9 \\"tool\\"\\n"}}',
    '{"name": "add", "%s": {}}, {"name": "add", "%s": {"a": [1.0, null]}}',
    '{"name": "add", "%s": {"a": 1}',
    '{"name": "add", "%s": "no object"}',
    '{"name": "add", "%s": {"a": 1}} and more',
    '{"name": "add", "%s": {"a": 1}, "id": "abcdefghi"}',
)
Piece = tuple[str, Any]
PIECES: st.SearchStrategy[Piece] = st.one_of(
    st.tuples(st.just("text"), WORDS),
    st.tuples(st.just("split"), WORDS),
    st.tuples(st.just("bytes"), st.binary(min_size=1, max_size=4)),
    st.tuples(st.just("text"), st.sampled_from(SPECIALS)),
    st.tuples(st.just("text"), st.sampled_from(PLAIN)),
    st.tuples(
        st.sampled_from(["text", "split"]), st.sampled_from([THOUGHT, "<think>x</think>", "<think>\n\n</think>"])
    ),
    st.tuples(st.just("text"), st.sampled_from([" ", "\n", "  \n\n"])),
)
CALLED: st.SearchStrategy[Piece] = st.tuples(st.sampled_from(["call", "split call"]), st.sampled_from(CALLS))
DRAWN = st.lists(PIECES, max_size=4) | st.tuples(st.lists(PIECES, max_size=1), CALLED).map(
    lambda both: [*both[0], both[1]]
)
BEHAVIOURS = ("goes on",) * 4 + ("edits", "goes back", "compacts", "asks again", "strips thoughts", "speaks for it")


@dataclass(frozen=True)
class Step:
    pieces: list[Piece]
    ends: bool
    behaviour: str
    text: str


STEPS = st.lists(st.builds(Step, DRAWN, st.booleans(), st.sampled_from(BEHAVIOURS), WORDS), min_size=1, max_size=6)


def drawn_ids(player: Player, chat: str, step: Step) -> list[int]:
    opening, key, closing = {
        "mistral": ("[TOOL_CALLS][", "arguments", "]"),
        "llama31": ("", "parameters", ""),
    }.get(chat, ("<tool_call>\n", "arguments", "\n</tool_call>"))
    ids: list[int] = []
    for kind, value in step.pieces:
        if kind == "bytes":
            ids += player.bytes(value)
            continue
        text = opening + value.replace("%s", key) + closing if kind.endswith("call") else value
        ids += player.split(text) if kind.startswith("split") else player.ids(text)
    end = player.ids(player.end)
    return [*ids, *end] if step.ends or not ids else ids


def following(messages: list[Message], said: Said, step: Step) -> list[Message]:
    """What the client sends next."""
    echo = said.echo
    if step.behaviour == "asks again":
        return messages
    if step.behaviour == "compacts":
        return [user("compact " + step.text)]
    if step.behaviour == "goes back":
        asked_at = max(at for at, message in enumerate(messages) if message["role"] == "user")
        return [*messages[:asked_at], user("back " + step.text)]
    if step.behaviour == "edits":
        echo["content"] = (echo.get("content") or "") + "edit"
    if step.behaviour == "strips thoughts":
        echo["content"] = re.sub(r"<think>.*?</think>\s*", "", echo.get("content") or "", flags=re.DOTALL)
    if step.behaviour == "speaks for it":
        return [*messages, echo]
    results = [result(call["id"]) for call in echo.get("tool_calls", ())]
    return [*messages, echo, *(results or [user(step.text)])]


@pytest.mark.parametrize("chat", CHATS)
def test_what_is_drawn_is_what_is_read_and_trained(chat: str) -> None:
    forks = set[str | None]()

    @settings(max_examples=80, derandomize=True, database=None)
    @given(STEPS, st.sampled_from(["", "the system"]), st.booleans())
    def play(steps: list[Step], system: str, tools: bool) -> None:
        player = Player(chat)
        messages = [{"role": "system", "content": system}] if system and chat != "gemma" else []
        messages.append(user())
        sendable = messages
        for step in steps:
            request = asked(messages, tools=tools and chat in WITH_TOOLS)
            try:
                said = player.say(request, drawn_ids(player, chat, step))
            except RequestError:
                messages = sendable
                continue
            player.check_episode()
            forks.add(said.turn.fork)
            sendable, messages = messages, following(messages, said, step)
        if player.turns:
            player.check_episode()

    play()
    assert forks == {None, Fork.REWRITTEN, Fork.DRIFT}


IDS = st.lists(st.integers(0, 300), min_size=1, max_size=3)


@settings(max_examples=200, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0), st.integers(0, 4), IDS, IDS), min_size=1, max_size=8))
def test_tokens_that_a_client_gives_continue_the_longest_recorded_beginning(
    steps: list[tuple[int, int, list[int], list[int]]],
) -> None:
    player = Player("qwen25")
    recorded: list[list[int]] = []
    for of, cut, rest, drawn in steps:
        earlier = recorded[of % len(recorded)] if recorded else []
        given_ids = [*earlier[: len(earlier) - cut], *rest]
        said = player.say(GenerateRequest(token_ids=given_ids), drawn, check=False)
        assert player.reads[-1].tolist() == given_ids
        begin = [index for index, ids in enumerate(recorded) if given_ids[: len(ids)] == ids]
        longest = max((len(recorded[index]) for index in begin), default=0)
        assert said.turn.parent == max((index for index in begin if len(recorded[index]) == longest), default=None)
        assert said.turn.context_ids.tolist() == given_ids[longest:]
        recorded.append([*given_ids, *drawn])
        player.check_episode()


# Examples.


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_an_echoed_answer_continues(chat: str, split: bool, ends: bool) -> None:
    player = Player(chat)
    messages = [user()]
    for content in ("the tool in there", "é€😀 the", '"x":  to\n\nthe "end"}', "a\u2028b"):
        text = content + player.end * ends
        said = player.say(asked(messages), player.split(text) if split else player.ids(text))
        assert said.answer == Answer(content)
        messages += [said.echo, user()]
    assert [(turn.parent, turn.fork) for turn in player.turns] == [(None, None), (0, None), (1, None), (2, None)]
    (sample,) = episode(player.turns)
    assert len(sample.environment) == 3
    player.check_episode()


@pytest.mark.parametrize("chat", CHATS)
def test_bytes_that_are_no_text_continue(chat: str) -> None:
    player = Player(chat)
    said = player.say(asked([user()]), [*player.bytes(b"a\xe2\x82 b\xff\xf0"), *player.ids(player.end)])
    assert said.answer.content == "a\ufffd b\ufffd\ufffd"
    again = player.say(asked([user(), said.echo, user()]), player.ids("in"))
    assert (again.turn.parent, again.turn.fork) == (0, None)
    player.check_episode()


def test_a_template_that_drops_thoughts_drifts_back_to_where_it_agrees() -> None:
    player = Player("qwen3")
    first = player.say(asked([user()]), player.split("the first<|im_end|>"))
    messages = [user(), first.echo, user()]
    second = player.say(asked(messages), player.split(THOUGHT + "the second<|im_end|>"))
    assert second.answer.content == THOUGHT + "the second"
    third = player.say(asked([*messages, second.echo, user()]), player.ids("in<|im_end|>"))
    assert [said.turn.fork for said in (first, second, third)] == [None, None, Fork.DRIFT]
    assert [said.turn.parent for said in (first, second, third)] == [None, 0, 0]
    kept = history(player.turns[:1]).tolist()
    assert third.prompt.token_ids[: len(kept)].tolist() == kept
    assert "the tool" not in third.prompt.text
    assert "the second" in player.text(third.turn.context_ids)
    player.check_episode()


@pytest.mark.parametrize("content", ["", "I add."])
def test_a_tool_loop_keeps_its_thoughts(content: str) -> None:
    player = Player("qwen3")
    messages = [user()]
    for at in range(3):
        call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {at}}}}}\n</tool_call>'
        text = THOUGHT + (content + "\n" if content else "") + call + player.end
        said = player.say(asked(messages, tools=True), player.split(text))
        assert said.answer.calls == (ToolCall("add", f'{{"a": {at}}}'),)
        assert said.answer.content == (THOUGHT + content).rstrip()
        messages += [said.echo, result(said.echo["tool_calls"][0]["id"])]
    last = player.say(asked(messages, tools=True), player.ids(THOUGHT + "3" + player.end))
    assert [turn.fork for turn in player.turns] == [None] * 4
    assert last.turn.parent == 2
    assert len(episode(player.turns)) == 1
    player.check_episode()


@pytest.mark.parametrize("content", [" the", "the \n"])
@pytest.mark.parametrize(
    ("chat", "fork"), [("llama3", Fork.DRIFT), ("llama31", Fork.DRIFT), ("gemma", Fork.DRIFT), ("qwen25", None)]
)
def test_trimmed_whitespace_drifts(chat: str, fork: Fork | None, content: str) -> None:
    player = Player(chat)
    said = player.say(asked([user()]), player.ids(content + player.end))
    assert said.answer.content == content
    again = player.say(asked([user(), said.echo, user()]), player.ids("in"))
    assert (again.turn.parent, again.turn.fork) == (None if fork else 0, fork)
    player.check_episode()


@pytest.mark.parametrize("chat", CHATS)
def test_special_tokens_in_an_answer_drift(chat: str) -> None:
    """The client never sees them."""
    player = Player(chat)
    said = player.say(asked([user()]), player.ids("to<|python_tag|>ol" + player.end))
    assert said.answer.content == "tool"
    again = player.say(asked([user(), said.echo, user()]), player.ids("in"))
    assert again.turn.fork is Fork.DRIFT
    player.check_episode()


@pytest.mark.parametrize("chat", CHATS)
def test_an_edited_answer_is_rewritten(chat: str) -> None:
    player = Player(chat)
    first = player.say(asked([user()]), player.split("the first" + player.end))
    messages = [user(), first.echo, user()]
    player.say(asked(messages), player.split("the second" + player.end))
    edited = {"role": "assistant", "content": "edited"}
    third = player.say(asked([*messages, edited, user()]), player.ids("in" + player.end))
    assert (third.turn.parent, third.turn.fork) == (0, Fork.REWRITTEN)
    whole = player.say(asked([user("other"), edited, user()]), player.ids("in"))
    assert (whole.turn.parent, whole.turn.fork) == (None, Fork.REWRITTEN)
    player.check_episode()


@pytest.mark.parametrize("chat", CHATS)
def test_going_back_continues_the_earlier_turn(chat: str) -> None:
    player = Player(chat)
    first = player.say(asked([user()]), player.split("the first" + player.end))
    messages = [user(), first.echo]
    player.say(asked([*messages, user("wrong")]), player.split("the second" + player.end))
    back = player.say(asked([*messages, user("right")]), player.split("the third" + player.end))
    assert (back.turn.parent, back.turn.fork) == (0, Fork.REWRITTEN)
    on = player.say(asked([*messages, user("right"), back.echo, user()]), player.ids("in"))
    assert (on.turn.parent, on.turn.fork) == (2, None)
    assert branches(player.turns) == [[0, 1], [2, 3]]
    kept = history(player.turns[:1]).tolist()
    assert episode(player.turns)[1].continues(np.zeros(0, np.int32))[: len(kept)].tolist() == kept
    player.check_episode()


def test_going_back_is_rewritten_even_if_an_answer_is_given_twice() -> None:
    player = Player("qwen25")
    first = player.say(asked([user()]), player.ids("in" + player.end))
    messages = [user(), first.echo]
    player.say(asked([*messages, user("wrong")]), player.ids("in" + player.end))
    back = player.say(asked([*messages, user("right")]), player.ids("the" + player.end))
    assert (back.turn.parent, back.turn.fork) == (0, Fork.REWRITTEN)


@pytest.mark.parametrize("answers", [("the tool", "in"), ("the tool", "the tool")])
@pytest.mark.parametrize("chat", CHATS)
def test_asking_again_opens_a_branch(chat: str, answers: tuple[str, str]) -> None:
    player = Player(chat)
    zeroth = player.say(asked([user()]), player.ids("the" + player.end))
    messages = [user(), zeroth.echo, user()]
    drawn = [player.say(asked(messages), player.split(answer + player.end)) for answer in answers]
    assert [(said.turn.parent, said.turn.fork) for said in drawn] == [(0, None), (0, Fork.REWRITTEN)]
    on = player.say(asked([*messages, drawn[1].echo, user()]), player.ids("in"))
    assert (on.turn.parent, on.turn.fork) == (2, None)
    first = player.say(asked([user()]), player.ids("to" + player.end))
    assert (first.turn.parent, first.turn.fork) == (None, Fork.REWRITTEN)
    player.check_episode()


@pytest.mark.parametrize("chat", ["qwen25", "llama3", "mistral"])
def test_a_new_beginning_opens_a_branch(chat: str) -> None:
    player = Player(chat)
    said = player.say(asked([user()]), player.ids("the" + player.end))
    new = player.say(asked([user("Before: " + said.answer.content)]), player.ids("in" + player.end))
    assert (new.turn.parent, new.turn.fork) == (None, Fork.REWRITTEN)
    assert episode(player.turns)[1].prompt_ids is not None
    player.check_episode()


def test_a_text_continues() -> None:
    player = Player("qwen25")
    text = "the "
    for drawn, more in [("tool in", " the"), ("é", "€"), ("to", ""), ("ol", ""), (" the", "\n")]:
        said = player.say(CompletionRequest(model=RUN, prompt=text), player.split(drawn))
        text += said.answer.content + more
    assert [turn.fork for turn in player.turns] == [None] * 5
    assert [len(turn.context_ids) for turn in player.turns[3:]] == [0, 0]
    (sample,) = episode(player.turns)
    assert len(sample.environment) == 2
    rewritten = player.say(CompletionRequest(model=RUN, prompt="the tool"), player.ids("in"))
    assert (rewritten.turn.parent, rewritten.turn.fork) == (None, Fork.REWRITTEN)
    player.check_episode()


def test_a_text_that_is_cut_within_a_character_continues() -> None:
    player = Player("qwen25")
    first = player.say(CompletionRequest(model=RUN, prompt="the "), player.bytes(b"\xe2"))
    text = "the " + first.answer.content
    second = player.say(CompletionRequest(model=RUN, prompt=text + "!"), player.bytes(b"\x82"))
    assert (second.turn.parent, second.turn.fork) == (0, None)
    third = player.say(CompletionRequest(model=RUN, prompt=text + "!" + second.answer.content), player.ids("in"))
    assert (third.turn.parent, third.turn.fork) == (1, None)
    player.check_episode()


def test_the_rest_of_a_character_adds_no_text_of_the_prompt() -> None:
    player = Player("qwen25")
    prompt = Prompt("the \ufffd", 0, None, np.zeros(0, np.int32), np.asarray(player.bytes(b"the \xe2"), np.int32))
    drawn = player.dialogue.added_text(prompt.token_ids, np.asarray(player.bytes(b"\x82\xac!"), np.int32))
    assert "the" not in drawn


def test_a_character_in_three_turns_continues() -> None:
    player = Player("qwen25")
    text = "the "
    for data in (b"\xe2", b"\x82", b"\xac", b"!"):
        prompt = CompletionRequest(model=RUN, prompt=text)
        text += player.say(prompt, player.bytes(data), check=False).answer.content
    assert [turn.fork for turn in player.turns] == [None] * 4
    assert history(player.turns).tolist() == [*player.ids("the "), *player.bytes(b"\xe2\x82\xac!")]


def test_the_space_before_a_word_that_decoding_drops_continues() -> None:
    """Decoders such as Llama 2's drop a space where a text begins; an answer is no beginning."""
    vocab = {token: at for at, token in enumerate(["<unk>", "</s>", "▁", "a", "b", "▁a"])}
    backend = BackendTokenizer(BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    player = Player("qwen25")
    player.dialogue = Dialogue(Tokenizer(eos_ids=frozenset({1}), pad_id=1, vocab_size=len(core), core=core))
    text = "b"
    for _ in range(3):
        said = player.say(CompletionRequest(model=RUN, prompt=text), [vocab["▁a"], vocab["b"]], check=False)
        text += said.answer.content
    assert text == "b ab ab ab"
    assert [turn.fork for turn in player.turns] == [None] * 3


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("chat", CHATS)
def test_messages_and_tokens_continue_each_other(chat: str, first: int) -> None:
    player = Player(chat)
    messages, known = [user()], list[int]()
    for at in range(first, first + 4):
        rest = player.tokenizer.render(messages).removeprefix(player.text(known))
        tokens = GenerateRequest(token_ids=[*known, *player.ids(rest)])
        said = player.say(asked(messages) if at % 2 else tokens, player.split("the tool" + player.end))
        known = [*player.reads[-1].tolist(), *said.turn.sample.token_ids.tolist()]
        messages += [said.echo, user()]
    assert [(turn.parent, turn.fork) for turn in player.turns] == [(None, None), (0, None), (1, None), (2, None)]
    player.check_episode()


def test_tokens_continue_a_text_that_is_not_theirs() -> None:
    """The tokenizer normalises texts, and begins them with a token."""
    core = make_chat_tokenizer(CHATS["qwen25"])
    core.backend_tokenizer.normalizer = normalizers.NFC()
    begin = ("<|endoftext|>", core.convert_tokens_to_ids("<|endoftext|>"))
    core.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    player = Player("qwen25")
    player.tokenizer = Tokenizer(eos_ids=frozenset({1}), pad_id=1, vocab_size=len(core), core=core)
    player.dialogue = Dialogue(player.tokenizer)
    text = "cafe\u0301 "
    first = player.say(CompletionRequest(model=RUN, prompt=text), player.ids("the"), check=False)
    known = [*player.reads[-1].tolist(), *player.ids("the")]
    assert player.text(known) == "<|endoftext|>caf\xe9 the"
    second = player.say(GenerateRequest(token_ids=[*known, *player.ids(" tool")]), player.ids("in"), check=False)
    third = player.say(CompletionRequest(model=RUN, prompt=f"{text}the toolin there"), player.ids("in"), check=False)
    assert [said.turn.parent for said in (first, second, third)] == [None, 0, 1]
    assert third.turn.context_ids.tolist() == player.ids(" there")
    player.check_episode()


@pytest.mark.parametrize("of_session", [True, False])
def test_a_stop_string_is_cut_from_the_answer_only(of_session: bool) -> None:
    player = Player("qwen25", sampling=Sampling(stop=("STOP",) if of_session else ()))
    stop: dict[str, Any] = {} if of_session else {"stop": ["STOP"]}
    said = player.say(asked([user()], **stop), player.ids("the toolSTOP"))
    assert said.answer == Answer("the tool")
    again = player.say(asked([user(), said.echo, user()], **stop), player.ids("in"))
    assert again.turn.fork is Fork.DRIFT
    assert player.text(player.turns[0].sample.token_ids) == "the toolSTOP"
    player.check_episode()


@pytest.mark.parametrize("stop", ["Observation:", "\nObservation:"])
def test_calls_are_read_before_a_stop_string(stop: str) -> None:
    player = Player("qwen25")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    said = player.say(asked([user()], tools=True, stop=stop), player.ids(call + stop))
    assert said.answer == Answer("", (ToolCall("add", '{"a": 1}'),))


@pytest.mark.parametrize("num_calls", [1, 2])
def test_mistral_calls_come_back(num_calls: int) -> None:
    player = Player("mistral")
    ids = [f"abcdefgh{at}" for at in range(num_calls)]
    calls = ", ".join(f'{{"name": "add", "arguments": {{"a": 1}}, "id": "{call_id}"}}' for call_id in ids)
    said = player.say(asked([user()], tools=True), player.split(f"[TOOL_CALLS][{calls}]</s>"))
    assert said.answer == Answer("", tuple(ToolCall("add", '{"a": 1}', call_id) for call_id in ids))
    messages = [user(), said.echo, *map(result, ids)]
    on = player.say(asked(messages, tools=True), player.ids("the 3</s>"))
    assert (on.turn.parent, on.turn.fork) == (0, None)
    player.check_episode()


@pytest.mark.parametrize(
    ("chat", "arguments", "fork"),
    [
        ("qwen3", '{"a": "the \\"tool\\"\\n\\\\ é \\u00e9"}', None),
        ("qwen3", '{"a":1.50,  "b":[]}', None),
        ("qwen25", '{"a": "the \\"tool\\"\\n\\\\ é"}', None),
        ("qwen25", '{"a": "\\u00e9"}', Fork.DRIFT),
        ("qwen25", '{"a":1.50}', Fork.DRIFT),
        ("llama31", '{"a": "the \\"tool\\"\\n\\\\ é"}', None),
        ("llama31", '{"a": "\\u00e9"}', Fork.DRIFT),
    ],
)
def test_arguments_with_escapes(chat: str, arguments: str, fork: Fork | None) -> None:
    player = Player(chat)
    call = (
        f'{{"name": "add", "parameters": {arguments}}}'
        if chat == "llama31"
        else f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    )
    said = player.say(asked([user()], tools=True), player.split(call + player.end))
    assert said.answer == Answer("", (ToolCall("add", arguments),))
    assert json.loads(arguments)
    messages = [user(), said.echo, result(said.echo["tool_calls"][0]["id"])]
    on = player.say(asked(messages, tools=True), player.ids("the"))
    assert (on.turn.parent, on.turn.fork) == (None if fork else 0, fork)
    player.check_episode()


def test_calls_are_not_read_unless_there_are_tools() -> None:
    player = Player("qwen3")
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    for request in (asked([user()]), asked([user()], tools=True, tool_choice="none")):
        assert player.say(request, player.ids(call + player.end)).answer == Answer(call)


def called(call_id: str, arguments: str = "{}") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


def calling(*calls: Message) -> Message:
    return {"role": "assistant", "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("chat", "messages", "tools", "field"),
    [
        ("gemma", [{"role": "system", "content": "in"}, user()], False, "messages.0"),
        ("gemma", [user(), user()], False, "messages.1"),
        ("gemma", [user(), {"role": "assistant", "content": "in"}, user(), user(), user()], False, "messages.3"),
        ("llama31", [user(), calling(called("a"), called("b")), result("a")], True, "messages.1"),
        ("mistral", [user(), calling(called("short")), result("short")], True, "messages.1"),
        ("mistral", [user(), calling(called("a" * 9)), result("a" * 9), user()], True, "messages.3"),
        ("qwen3", [user(), calling(called("a", "[1]"))], True, "messages.1.tool_calls.0.function.arguments"),
        (
            "qwen25",
            [user(), calling(called("a"), called("b", "{"))],
            True,
            "messages.1.tool_calls.1.function.arguments",
        ),
        ("qwen25", [user(), calling(called("a", '{"a": "\\ud800"}'))], True, "messages"),
        ("llama3", [user(), calling(called("a"))], False, "messages.1.tool_calls"),
        ("gemma", [user()], True, "tools"),
    ],
)
def test_what_is_refused_is_named(chat: str, messages: list[Message], tools: bool, field: str) -> None:
    player = Player(chat)
    with pytest.raises(RequestError, match=re.escape(field)) as refused:
        player.say(asked(messages, tools=tools), player.ids("in"))
    assert str(refused.value.errors[0]["field"]).startswith(field)
    assert player.turns == []
