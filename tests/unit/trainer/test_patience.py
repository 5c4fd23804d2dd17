"""What is said while somebody waits."""

from __future__ import annotations

import re
import threading
from itertools import count

import pytest

from dvp_lab.__main__ import progress
from dvp_trainer import patience
from dvp_trainer.patience import patient
from tests.kit.wait import until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dvp_trainer.patience.SILENCE_S", 0.02)
    monkeypatch.setattr("dvp_trainer.patience.LONGEST_SILENCE_S", 0.02)


def is_telling() -> bool:
    return any(thread.name == patience.__name__ for thread in threading.enumerate())


def test_a_wait_is_said_again_and_again_until_it_ends() -> None:
    said, numbers = list[str](), count(1)
    with patient(lambda: f"has {next(numbers)}", said.append):
        until(lambda: len(said) >= 3, "it is said three times")
    assert said[:3] == [f"has {number}, 0 s so far" for number in (1, 2, 3)]
    assert not is_telling()


def test_a_failure_ends_it_too() -> None:
    said = list[str]()

    def fail() -> None:
        until(lambda: said, "it is said")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), patient("loading", said.append):
        fail()
    assert not is_telling()


def test_what_usually_takes_long_is_mentioned_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()

    class Ended:
        def wait(self, pause_s: float) -> bool:
            pauses.append(pause_s)
            return True

        def set(self) -> None: ...

    monkeypatch.setattr(patience, "Event", Ended)
    for usual_s in (0.0, 100.0):
        with patient("training", usual_s=usual_s):
            pass
    assert pauses == [patience.SILENCE_S, 200.0]


def test_the_lab_tells_how_far_a_stage_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""

    def has(text: str) -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return text in said

    with progress() as tell:
        tell(0, 12, "training")
        until(lambda: has("training: 0 of 12, 0 s so far"), "nothing is done yet")
        tell(7, 12, "training, rho = 2")
        until(lambda: has("training, rho = 2: 7 of 12, "), "seven are done")
        tell(0, 3, "measuring")
        until(lambda: has("measuring: 0 of 3, "), "the next stage has begun")
    assert len(re.findall(r"^training$", said, re.MULTILINE)) == 1
