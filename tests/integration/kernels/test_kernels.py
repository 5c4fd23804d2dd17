"""The Triton kernels where there is no GPU. On one, tests/unit/dvp/test_lm_head.py and test_pruning.py run them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from dvp_rl.dvp import lm_head
from tests.integration.engines.servers import sglang_python
from tests.kit import processes

SCRIPT = Path(__file__).with_name("interpreted.py")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["interpreter", "compiler"])
def test_kernels_interpreted_and_compiled(what: str, tmp_path: Path) -> None:
    """In the environment with SGLang, which has Triton."""
    path = f"{processes.ROOT}:{processes.ROOT / 'services'}"
    done = processes.run([sglang_python(), SCRIPT, what], PYTHONPATH=path, TRITON_CACHE_DIR=str(tmp_path))
    assert done.stdout.endswith("ok\n"), done.stdout + done.stderr


def test_where_the_kernels_do_not_work_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """They need Triton or, where it is installed, a GPU."""
    lm_head.kernels_on.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert lm_head.kernels_on(torch.device("cpu"), torch.float32) is None
    (record,) = caplog.records
    assert "the LM head runs without its Triton kernels" in record.getMessage()
