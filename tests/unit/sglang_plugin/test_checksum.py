"""The weights that the hook lets SGLang load."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from dvp_rl.engines.sglang_wire import CHECKED
from dvp_rl.sglang_plugin.checksum import FORMAT, SGLANG_FORMAT, Weights, receive_checked, sha256

WEIGHTS: Weights = [
    ("matrix", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)),
    ("number", torch.tensor(1.5)),
    ("nothing", torch.empty(0)),
]
DIGEST = hashlib.sha256(b"".join(w.reshape(-1).view(torch.uint8).numpy().tobytes() for _, w in WEIGHTS)).hexdigest()


class Updater:
    """Records the arguments of its calls."""

    def receive(self, *, load_format: str | None, **bucket: Any) -> Weights:
        self.asked = (load_format, bucket)
        return WEIGHTS


def test_the_bytes_announced_go_through() -> None:
    updater = Updater()
    found = receive_checked(Updater.receive, updater, load_format=FORMAT + DIGEST, names=["matrix"], group_name="g")
    assert found is WEIGHTS
    assert updater.asked == (SGLANG_FORMAT, {"names": ["matrix"], "group_name": "g"})


def test_other_bytes_do_not() -> None:
    with pytest.raises(ValueError, match=f"expected bytes with SHA-256 {'0' * 64}, received {DIGEST}"):
        receive_checked(Updater.receive, Updater(), load_format=FORMAT + "0" * 64)


def test_a_number_more_or_less_shows() -> None:
    assert sha256(WEIGHTS) == DIGEST
    assert sha256([*WEIGHTS, ("more", torch.zeros(1))]) != DIGEST
    assert sha256(WEIGHTS[::-1]) != DIGEST


@pytest.mark.parametrize("load_format", [None, SGLANG_FORMAT, "flattened"])
def test_what_others_send_is_untouched(load_format: str | None) -> None:
    updater = Updater()
    assert receive_checked(Updater.receive, updater, load_format=load_format, names=[]) is WEIGHTS
    assert updater.asked == (load_format, {"names": []})


def test_engine_and_plugin_mean_the_same() -> None:
    """The two share no constant, because the plugin is also a separate wheel."""
    assert CHECKED == FORMAT
