"""Who may write into the folder of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.contract.errors import LeaseLostError
from trainer.checkpoint import Checkpoints, Progress


def write_state(folder: Path) -> None:
    folder.mkdir()


def test_the_folder_remembers_the_highest_token(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, keep=1).newest_token() == 0
    for token in (7, 12):
        Checkpoints(tmp_path, keep=1).claim(token)
        assert Checkpoints(tmp_path, keep=1).newest_token() == token


def test_a_trainer_that_wakes_up_before_its_claim_takes_nothing_from_its_successor(tmp_path: Path) -> None:
    successor = Checkpoints(tmp_path, keep=1)
    successor.claim(12)
    with pytest.raises(LeaseLostError, match="another trainer took over"):
        Checkpoints(tmp_path, keep=1).claim(7)
    successor.save(Progress(step=3), write_state)
    assert successor.steps() == [3]
