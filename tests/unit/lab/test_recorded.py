"""The signature of a run, computed from its recorded tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dvp_lab.page import write_page
from dvp_lab.recorded import Noise, Tokens, recorded_signature
from dvp_lab.study import Study
from dvp_rl.contract.errors import ConfigError
from dvp_rl.dvp.evidence import Evidence
from dvp_rl.dvp.policy import constrained_logprobs
from dvp_trainer.report.token_log import read_tokens, write_tokens

N, T, V, S, LOG_MIN_P = 64, 40, 50, 0.2, -9.0


def evidence(seed: int) -> Evidence:
    """Tokens drawn from an engine whose logits have noise S. Different seeds give different lengths."""
    torch.manual_seed(seed)
    train = 1.5 * torch.randn(N, T + seed, V, dtype=torch.float64)
    infer = train + S * torch.randn_like(train)
    keep = infer - infer.amax(-1, keepdim=True) >= LOG_MIN_P
    tokens = torch.distributions.Categorical(logits=infer.masked_fill(~keep, -torch.inf)).sample()
    own, theirs = (constrained_logprobs(z, tokens, log_min_p=LOG_MIN_P, temperature=1.0) for z in (train, infer))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    return Evidence(torch.arange(N), mask, own, theirs)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    written = [evidence(seed) for seed in (0, 1)]
    for step, part in enumerate(written, start=9):
        write_tokens(part, tmp_path, step)
    for before, after in zip(written, read_tokens(tmp_path), strict=True):
        for name, tensor in before.tensors().items():
            assert torch.equal(after.tensors()[name], tensor)


def test_the_prediction_is_met_where_the_noise_is_gaussian(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_tokens(evidence(seed), tmp_path, seed)
    study = recorded_signature(tmp_path)
    assert len(study.charts) == 1
    rows = {row[0]: row for row in study.tables[0].rows}
    assert sum(row[1] for row in rows.values()) == pytest.approx(N * (T - 1 + T), rel=0.01)
    assert Noise.of([Tokens.of(evidence(seed)) for seed in (0, 1)]).s2 == pytest.approx(S**2, rel=0.1)
    for name in ("0.001–0.01", "0.01–0.1", "0.1–0.5"):
        value, error = (float(part) for part in rows[name][-2].split(" ± "))
        assert abs(value - rows[name][-1]) <= error + 0.1 * abs(value), name
        assert error < 0.5 * abs(value), "the interval is narrow enough to decide"


def test_a_run_without_a_record_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokens-interval 1"):
        recorded_signature(tmp_path)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "step-00000001.safetensors").write_bytes(b"half")
    with pytest.raises(ConfigError, match="not a complete record"):
        recorded_signature(tmp_path)


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It has one `inside`, the trainer's; the engine's own tokens were always inside."""
    (tmp_path / "tokens").mkdir()
    written = evidence(0)
    older = written.tensors()
    older["inside"] = older.pop("train_inside")
    del older["infer_inside"]
    save_file(older, tmp_path / "tokens" / "step-00000001.safetensors")
    (read,) = read_tokens(tmp_path)
    assert read.tensors().keys() == written.tensors().keys()
    assert all(torch.equal(tensor, read.tensors()[name]) for name, tensor in written.tensors().items())


@pytest.mark.parametrize("inside", [True, False])
def test_a_run_without_mismatch_or_without_a_common_token_has_a_page(inside: bool, tmp_path: Path) -> None:
    # Two copies, because a file of tensors must not hold the same memory twice.
    sides = [evidence(0).train for _ in range(2)]
    train, infer = (side._replace(inside=torch.full_like(side.inside, inside)) for side in sides)
    write_tokens(replace(evidence(0), train=train, infer=infer), tmp_path, 1)
    study = recorded_signature(tmp_path)
    assert study.charts == ()
    assert any("typically off by 0\N{NO-BREAK SPACE}%" in sentence for sentence in study.conclusion) is inside
    assert bool(study.conclusion) is inside
    assert write_page(Study.load(study.save(tmp_path)), tmp_path).is_file()
