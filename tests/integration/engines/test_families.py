"""The transformers engine matches the float64 oracle for a family, or refuses it with an error that names the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines.transformers import TransformersEngine
from tests.kit.families import write_small_model
from tests.models import CASES, LONGROPE, ROPE_LIMIT, WINDOW, Case, served

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # raised by gpt_bigcode


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_right_or_refused_by_name(case: Case, tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "model", case.family, **case.overrides)
    assert await served(folder) == case.served


def test_a_context_ends_where_the_rope_changes(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "model", "phi3", **LONGROPE)
    assert TransformersEngine(folder).context_length == ROPE_LIMIT
    with pytest.raises(ConfigError, match=f"max_context {ROPE_LIMIT + 1}: must lie in 2 to {ROPE_LIMIT}"):
        TransformersEngine(folder, max_context=ROPE_LIMIT + 1)


async def test_attention_that_cannot_be_exchanged_is_named(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "model", "gpt_neo", window_size=WINDOW)
    with pytest.raises(ConfigError, match="gpt_neo has its own attention; use the sglang engine"):
        await TransformersEngine(folder).start()
