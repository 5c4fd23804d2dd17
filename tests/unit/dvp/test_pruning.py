"""The hook's tensor code against dvp_rl.dvp and a float64 oracle of the set, on each device."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dvp_rl.dvp.policy import constrained_logprobs, safe_set
from dvp_rl.dvp.pruning import ROUNDING, prune, read_log_min_p
from dvp_rl.sglang_plugin.kept import add_kept
from tests.kit.devices import DEVICES

VOCAB = 500
LOG_MIN_PS = (-13.0, -6.0, -3.0, -0.5)
TEMPERATURES = (0.5, 0.7, 1.0, 1.5)


def as_requests(log_min_ps: list[float], temperatures: list[float]) -> tuple[Tensor, Tensor]:
    """min_ps [batch] and temperatures [batch, 1] as SGLang holds them; -inf is a request without min_p."""
    return torch.tensor([math.exp(x) for x in log_min_ps]), torch.tensor(temperatures).view(-1, 1)


def make_logits(rows: int, vocab: int = VOCAB) -> Tensor:
    return 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))


def prune_on(device: torch.device, logits: Tensor, settings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Prunes the logits in place on the device. Kept masses and kept counts."""
    there, *rest = (tensor.to(device) for tensor in (logits, *settings))
    kept = prune(there, *rest).cpu()
    logits.copy_(there)
    return kept[0], kept[1]


def bits(logits: Tensor) -> Tensor:
    """The bits of each value, by which any NaN equals any other and 0.0 differs from -0.0."""
    return torch.where(logits.isnan(), math.nan, logits).view(torch.int32)


@pytest.mark.parametrize("log_min_p", LOG_MIN_PS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_exactly_the_complement_of_the_safe_set_is_removed(
    log_min_p: float, temperature: float, device: torch.device
) -> None:
    logits = make_logits(64)
    # Both sides use the float32 temperature.
    min_ps, temperatures = as_requests([log_min_p] * 64, [temperature] * 64)
    keep = safe_set(logits, log_min_p=log_min_p, temperature=temperatures.view(-1))
    pruned = logits.clone()
    mass, count = prune_on(device, pruned, (min_ps, temperatures))
    assert (pruned[~keep] == -math.inf).all()
    assert (bits(pruned)[keep] == bits(logits)[keep]).all()
    tokens = pruned.argmax(-1)
    expected = constrained_logprobs(logits, tokens, log_min_p=log_min_p, temperature=temperatures.view(-1))
    assert torch.equal(count.int(), expected.kept_count)
    torch.testing.assert_close(mass, expected.kept_mass, atol=1e-6, rtol=0)
    assert (mass <= 1).all()


def test_softmax_of_what_is_left_is_the_constrained_policy(device: torch.device) -> None:
    """SGLang computes log(softmax(z / T)) of the drawn token next."""
    logits, settings = make_logits(16), [(p, t) for p in LOG_MIN_PS for t in TEMPERATURES]
    min_ps, temperatures = as_requests([p for p, _ in settings], [t for _, t in settings])
    pruned = logits.clone()
    prune_on(device, pruned, (min_ps, temperatures))
    drawn = torch.multinomial((pruned / temperatures).softmax(-1), 1, generator=torch.Generator().manual_seed(1))
    theirs = (pruned / temperatures).softmax(-1).log().gather(-1, drawn).squeeze(-1)
    exact = [
        constrained_logprobs(row.double(), token, log_min_p=log_min_p, temperature=temperature)
        for row, token, (log_min_p, temperature) in zip(logits, drawn.squeeze(-1), settings, strict=True)
    ]
    assert all(each.inside for each in exact)
    torch.testing.assert_close(theirs.double(), torch.stack([each.logprobs for each in exact]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("log_min_p", [-13.0, -6.5, -3.0])
def test_ties_at_the_threshold_stay(log_min_p: float, device: torch.device) -> None:
    """bfloat16 logits lie on a grid, and min_p in float32 does not represent -13 exactly."""
    logits = torch.full((1, 100), -40.0)
    logits[0, :3] = torch.tensor([2.0, 2.0 + log_min_p, 2.0 + log_min_p - 2**-8])
    _, count = prune_on(device, logits, as_requests([log_min_p], [1.0]))
    assert logits.isfinite().nonzero()[:, 1].tolist() == [0, 1]
    assert count.tolist() == [2]


def test_rows_without_min_p_stay_bit_for_bit(device: torch.device) -> None:
    """Rows without min_p share a batch with pruned rows and may hold any values."""
    logits = make_logits(8)
    logits[1, 3], logits[3, 5], logits[5, 7:] = math.nan, math.inf, -math.inf
    logits[7] = -0.0
    before = logits.clone()
    _, count = prune_on(device, logits, as_requests([-3.0, -math.inf] * 4, [0.5] * 8))
    assert torch.equal(bits(logits)[1::2], bits(before)[1::2])
    assert (count[1::2] == 0).all()
    assert (count[0::2] > 0).any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_left_to_sglang(value: float, device: torch.device) -> None:
    logits = make_logits(3)
    logits[1, 9] = value
    before = logits.clone()
    _, count = prune_on(device, logits, as_requests([-3.0] * 3, [1.0] * 3))
    assert torch.equal(bits(logits)[1], bits(before)[1])
    assert count.bool().tolist() == [True, False, True]


def test_tokens_that_a_grammar_forbids_stay_forbidden(device: torch.device) -> None:
    """Forbidden tokens are already -inf; the set, its mass and its count are those of the allowed tokens."""
    logits = make_logits(1)
    logits[0, 40:] = -math.inf
    allowed = logits[:, :40].clone()
    settings = as_requests([-3.0], [1.0])
    kept, alone = prune_on(device, logits, settings), prune_on(device, allowed, settings)
    assert torch.equal(logits[:, :40], allowed)
    assert (logits[:, 40:] == -math.inf).all()
    torch.testing.assert_close(kept, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_strides_and_a_large_vocabulary(dtype: torch.dtype, device: torch.device) -> None:
    settings = as_requests([-13.0, -3.0, -math.inf] * 2, [0.7, 1.0, 1.3] * 2)
    whole = make_logits(6, vocab=60_003).to(dtype)
    expected = whole[:, ::3].contiguous()
    _, expected_count = prune(expected, *settings)
    there = whole.to(device)
    _, count = prune(there[:, ::3], *(setting.to(device) for setting in settings))
    assert torch.equal(there[:, ::3].cpu(), expected)
    assert torch.equal(there[:, 1::3].cpu(), whole[:, 1::3])
    assert torch.equal(count.cpu(), expected_count)


def test_empty_batch(device: torch.device) -> None:
    mass, count = prune_on(device, make_logits(0), as_requests([], []))
    assert mass.shape == count.shape == (0,)


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    logits = make_logits(3000)
    settings = as_requests([-3.0, -13.0, -math.inf] * 1000, [0.7, 1.0, 1.3] * 1000)
    whole = logits.clone()
    mass, count = prune_on(device, whole, settings)
    assert mass.shape == count.shape == (3000,)
    part, (min_ps, temperatures) = logits[1500:1503].clone(), settings
    again, _ = prune_on(device, part, (min_ps[1500:1503], temperatures[1500:1503]))
    assert torch.equal(whole[1500:1503], part)
    assert torch.equal(mass[1500:1502], again[:2])


@pytest.mark.parametrize("rows", [1, 3])
def test_settings_of_other_rows_are_refused(rows: int, device: torch.device) -> None:
    with pytest.raises(ValueError, match=rf"min_ps \({rows},\) .*expected \(2,\)"):
        prune_on(device, make_logits(2), as_requests([-3.0] * rows, [1.0] * rows))


def test_nothing_waits_for_the_device() -> None:
    """A meta tensor has no values, so any read on the host would raise."""
    logits, settings = make_logits(6).to("meta"), [setting.to("meta") for setting in as_requests([-3.0] * 6, [0.7] * 6)]
    kept = prune(logits, *settings)  # type: ignore[arg-type]
    assert kept.shape == (2, 6)
    with pytest.raises(RuntimeError, match="meta"):
        kept[1, 0].item()


@pytest.mark.skipif("cuda" not in DEVICES, reason="no GPU here")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_synchronises_a_gpu() -> None:
    logits, settings = make_logits(6), as_requests([-3.0, -math.inf, -13.0] * 2, [0.7] * 6)
    expected, info = prune(logits.clone(), *settings), dict[str, Any]()
    on_device = [tensor.cuda() for tensor in (logits, *settings)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        add_kept(info, prune(*on_device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [info["kept_count"][row] or 0 for row in range(6)] == expected[1].tolist()


@pytest.mark.parametrize("meant", [-13.0, -6.0, -3.0, -2.5, -1 / 1024, 0.0, -math.inf])
def test_round_numbers_survive_float32(meant: float) -> None:
    assert read_log_min_p(torch.tensor([math.exp(meant)])).item() == meant


@given(st.floats(-80.0, 0.0))
def test_other_numbers_survive_it_within_rounding(meant: float) -> None:
    """A number is rounded at most twice: to float32, and to a round number nearby."""
    assert abs(read_log_min_p(torch.tensor([math.exp(meant)])).item() - meant) <= 2 * ROUNDING * 1.001


def test_response_has_plain_numbers_and_null_for_other_rows() -> None:
    logits = make_logits(3)
    logits[2, 0] = math.nan
    kept = prune(logits, *as_requests([-3.0, -math.inf, -3.0], [1.0] * 3))
    info: dict[str, Any] = {"theirs": ["a", "b", "c"]}
    add_kept(info, kept)
    # As SGLang reads them: the first read replaces the columns while it walks through the entries.
    rows = [{name: column[row] for name, column in info.items()} for row in range(3)]
    assert json.loads(json.dumps(rows)) == [
        {"theirs": "a", "kept_mass": kept[0, 0].item(), "kept_count": kept[1, 0].item()},
        {"theirs": "b", "kept_mass": None, "kept_count": None},
        {"theirs": "c", "kept_mass": None, "kept_count": None},
    ]
    assert type(rows[0]["kept_count"]) is int
    assert type(info["kept_mass"]) is type(info["kept_count"]) is list


def test_columns_of_a_copied_response_still_have_their_values() -> None:
    """Another plugin may have copied the entries before SGLang reads them."""
    info: dict[str, Any] = {}
    add_kept(info, prune(make_logits(2), *as_requests([-3.0, -math.inf], [1.0] * 2)))
    copied = dict(info)
    assert info["kept_count"][0] == copied["kept_count"][0] > 0
    assert copied["kept_mass"][1] is None
