r"""Rewards of completions.

A reward is any function of this form, or of TRL's (reward_forms.py); it runs in a worker process (reward_pool.py),
never in the trainer:

    def reward(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float

`completion` is the sampled text without special tokens, `answer` the row's answer, `prompt` the prompt's text (for a
chat, the contents joined by blank lines) and `extra` the row's other columns as JSON values. The function returns one
finite number. Built-in rewards are `math`, `exact_match` and `arithmetic`; your own is `module:function`, found on the
import path or in the working directory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

from dvp_rl.contract.errors import ConfigError
from dvp_rl.hooks import choice_or_hook, load_hook
from dvp_trainer.options import RewardName


class Reward(Protocol):
    def __call__(self, completion: str, answer: str | None, /, *, prompt: str, extra: dict[str, Any]) -> float: ...


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) for a completion of `length` tokens:

    0 up to max_tokens - buffer, then linear down to -1 at max_tokens; -1 beyond. A buffer of 0 punishes only what is
    beyond max_tokens.
    """
    over = length - (max_tokens - buffer)
    if over <= 0:
        return 0.0
    return -min(over / buffer, 1.0) if buffer else -1.0


def exact_match(completion: str, answer: str | None, /, *, prompt: str, extra: dict[str, Any]) -> float:
    """1 if both texts are equal apart from surrounding white space."""
    return float(completion.strip() == _given(answer).strip())


def arithmetic(completion: str, answer: str | None, /, *, prompt: str, extra: dict[str, Any]) -> float:
    """1 if the completion is the answer as a decimal integer and nothing else; leading zeros are allowed."""
    text, expected = completion.strip(), int(_given(answer))
    return float(re.fullmatch(r"-?\d{1,4000}", text, re.ASCII) is not None and int(text) == expected)


def math(completion: str, answer: str | None, /, *, prompt: str, extra: dict[str, Any]) -> float:
    r"""1 if math-verify finds the stated result equal to the answer.

    The result is the last `\boxed{...}` or the last line `Answer: ...` (DAPO), whichever comes later. A completion that
    states no result gets 0: a number that merely occurs in the text does not count.
    """
    gold = _given(answer).strip()
    result = stated_result(completion)
    if result is None:
        return 0.0
    return float(result == gold or _same_mathematics(gold, result))


def given(completion: str, answer: str | None, /, *, prompt: str, extra: dict[str, Any]) -> float:
    """Fails: only episodes that their harness did not reward are scored."""
    raise ValueError("the harness finished the episode without a reward")


def stated_result(completion: str) -> str | None:
    r"""The result stated by the last `\boxed{...}` (braces balanced) or `Answer: ...` (without surrounding `$`),
    whichever comes later; None if there is none. The result of `Answer:` may follow on a later line, and both word and
    result may be emphasised in Markdown."""
    starts = [match.end() for match in re.finditer(r"\\boxed\s*\{", completion)]
    lines = list(re.finditer(r"answer[\s*_]*:[\s*_]*([^\s*_][^\n]*)", completion, re.IGNORECASE))
    boxed = _balanced(completion, starts[-1]) if starts else None
    if boxed is not None and (not lines or starts[-1] > lines[-1].start()):
        return boxed.strip()
    return lines[-1][1].strip(" \t*$.") if lines else None


def _balanced(text: str, start: int) -> str | None:
    """text[start:] up to the brace that closes the one before `start`; None if it is never closed."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return None


def _same_mathematics(gold: str, result: str) -> bool:
    # The worker's time limit applies; that of math-verify would replace its handler for the same signal.
    verifier = _math_verify()
    plain = [THOUSANDS.sub("", text) for text in (gold, result)]
    parsed = [verifier.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in plain]
    return bool(verifier.verify(*parsed, timeout_seconds=None))


@cache
def _math_verify() -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math_verify.verify(*[math_verify.parse("\\boxed{1}", parsing_timeout=None)] * 2, timeout_seconds=None)
    return math_verify


def _given(answer: str | None) -> str:
    if answer is None:
        raise ValueError("this reward needs the row's answer, but the row has none")
    return answer


THOUSANDS = re.compile(r"(?<=\d)(?:\\[,:; ]|[~\s])(?=\d{3}(?!\d))")
"""Thousands separators in a number as LaTeX sets them; math-verify would read them as a product."""
NAMED: dict[str, Reward] = {
    RewardName.MATH: math,
    RewardName.EXACT_MATCH: exact_match,
    RewardName.ARITHMETIC: arithmetic,
    RewardName.GIVEN: given,
}


def needs_answer(name: str) -> bool:
    """True for built-in rewards that compare with the row's answer; a user's own function decides for itself."""
    return name in NAMED and name != RewardName.GIVEN


def resolve_reward(name: str) -> Callable[..., Any]:
    """A named reward, or `module:function` imported with the working directory at the END of the import path.

    Raises ConfigError if there is no such reward. Slow imports happen here, not within the first sample's time limit.
    """
    try:
        name = choice_or_hook(RewardName, name)
    except ValueError as error:
        raise ConfigError(f"reward.name {name!r}: {error}") from None
    if name == RewardName.MATH:
        _math_verify()
    return NAMED[name] if name in NAMED else load_hook("reward.name", name)
