"""The sampler draws from the constrained distribution, and the test rejects samplers that do not."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dvp_rl.dvp.policy import constrained_logprobs, safe_set
from dvp_rl.dvp.sampler import Draw, finite_rows, sample
from tests.unit.dvp import oracle

REJECT = 1e-4
CHUNK = 512
CPU = torch.device("cpu")


class Case(NamedTuple):
    """Logits with a head spread evenly over nine tenths of the kept range, and a flat tail just below the threshold."""

    log_min_p: float
    temperature: float
    head: int
    tail: int
    draws: int

    def logits(self) -> Tensor:
        head = torch.linspace(0.0, 0.9 * self.temperature * self.log_min_p, self.head)
        tail = torch.full((self.tail,), self.temperature * self.log_min_p - 1e-3)
        order = torch.randperm(self.head + self.tail, generator=torch.Generator().manual_seed(7))
        return torch.cat([head, tail])[order]


NARROW = [Case(-6.0, temperature, 24, 300, 60_000) for temperature in (0.7, 1.0, 1.3)]
CASES = [
    *NARROW,
    *(Case(math.log(0.1), temperature, 24, 20, 60_000) for temperature in (0.7, 1.0, 1.3)),
    *(Case(-1.0, temperature, 24, 6, 60_000) for temperature in (0.7, 1.3)),
    Case(-13.0, 1.0, 6, 27_500, 20_000),
]


def draw(
    case: Case,
    device: torch.device = CPU,
    *,
    log_min_p: float | None = None,
    temperature: float | None = None,
    seed: int = 0,
) -> np.ndarray:
    """case.draws token ids, from the case's own policy or from a wrong one."""
    generator = torch.Generator().manual_seed(seed)
    logits = case.logits().to(device)
    rows = []
    for start in range(0, case.draws, CHUNK):
        size = min(CHUNK, case.draws - start)
        uniforms = torch.rand(size, dtype=torch.float64, generator=generator)
        out = sample(
            logits.expand(size, -1),
            uniforms.to(device),
            log_min_p=case.log_min_p if log_min_p is None else log_min_p,
            temperature=case.temperature if temperature is None else temperature,
        )
        rows.append(out.token_ids.cpu().numpy())
    return np.concatenate(rows)


def pooled(observed: np.ndarray, expected: np.ndarray, least: float = 5.0) -> tuple[np.ndarray, np.ndarray]:
    """Observed and expected counts in order of expectation, joined into cells that expect at least `least`, except the
    last."""
    order = np.argsort(expected)
    cells: list[list[float]] = [[0.0, 0.0]]
    for o, e in zip(observed[order], expected[order], strict=True):
        if cells[-1][1] >= least:
            cells.append([0.0, 0.0])
        cells[-1][0] += o
        cells[-1][1] += e
    o_cells, e_cells = np.array(cells).T
    return o_cells, e_cells


def chi_square_p(case: Case, token_ids: np.ndarray) -> float:
    """p-value of the draws under the oracle's constrained distribution; 0 if any lies outside S."""
    policy = oracle.policy(case.logits().numpy(), case.log_min_p, case.temperature)
    counts = np.bincount(token_ids, minlength=len(policy.keep))
    if counts[~policy.keep].any():
        return 0.0
    observed, expected = pooled(counts[policy.keep], len(token_ids) * np.exp(policy.logprobs[policy.keep]))
    assert len(observed) >= 4
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_constrained_distribution(device: torch.device, case: Case) -> None:
    assert 0.05 < 1 - oracle.policy(case.logits().numpy(), case.log_min_p, case.temperature).kept_mass < 0.30
    assert chi_square_p(case, draw(case, device)) > REJECT


@pytest.mark.parametrize("case", CASES)
def test_an_unmasked_sampler_is_rejected(case: Case) -> None:
    assert chi_square_p(case, draw(case._replace(draws=2_000), log_min_p=-math.inf)) < REJECT


@pytest.mark.parametrize("factor", [0.95, 1.05])
@pytest.mark.parametrize("case", NARROW)
def test_a_temperature_off_by_five_percent_is_rejected(case: Case, factor: float) -> None:
    # The threshold tau * log rho is unchanged, so the test rejects the shape and not the set.
    wrong = draw(case, temperature=case.temperature * factor, log_min_p=case.log_min_p / factor)
    policy = oracle.policy(case.logits().numpy(), case.log_min_p, case.temperature)
    assert policy.keep[wrong].all()
    assert chi_square_p(case, wrong) < REJECT


def make_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocab", [5, 3000])
def test_log_probs_are_those_of_constrained_logprobs(device: torch.device, vocab: int, dtype: torch.dtype) -> None:
    logits = make_logits(200, vocab).to(device, dtype)
    uniforms = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    got = sample(logits, uniforms, log_min_p=-6.0, temperature=0.7)
    expected = constrained_logprobs(logits, got.token_ids, log_min_p=-6.0, temperature=0.7)
    assert expected.inside.all()
    assert torch.equal(got.logprobs, expected.logprobs)
    assert torch.equal(got.kept_mass, expected.kept_mass)
    assert torch.equal(got.kept_count, expected.kept_count)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53, 1.0])
@pytest.mark.parametrize("log_min_p", [-13.0, -2.0, 0.0])
def test_never_outside_the_set_even_at_the_ends(device: torch.device, log_min_p: float, uniform: float) -> None:
    logits = make_logits(500, 97).to(device)
    logits[:, 0] = logits[:, -1] = -90.0  # both ends of the CDF are outside
    uniforms = torch.full((500,), uniform, dtype=torch.float64, device=device)
    got = sample(logits, uniforms, log_min_p=log_min_p, temperature=1.0)
    keep = safe_set(logits, log_min_p=log_min_p, temperature=1.0)
    assert keep.gather(-1, got.token_ids[:, None]).all()


def test_inverse_cdf_takes_the_token_that_holds_the_uniform() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    uniforms = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, 0.9999], dtype=torch.float64)
    got = sample(logits.expand(8, -1), uniforms, log_min_p=-13.0, temperature=1.0)
    assert got.token_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_uniform_on_an_edge_belongs_to_the_token_that_starts_there() -> None:
    uniforms = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    got = sample(torch.zeros(4, 4), uniforms, log_min_p=-13.0, temperature=1.0)
    assert got.token_ids.tolist() == [0, 1, 2, 3]


def assert_greedy(draw: Draw, rows: Tensor, logits: Tensor) -> None:
    assert torch.equal(draw.token_ids[rows], logits[rows].argmax(-1))
    assert (draw.logprobs[rows] == 0).all()
    assert (draw.kept_mass[rows] == 1).all()
    assert (draw.kept_count[rows] == 1).all()


def test_temperature_zero_is_greedy_alone_and_among_others(device: torch.device) -> None:
    logits = make_logits(6, 40).to(device)
    logits[0, 3] = logits[0, 9] = 30.0
    uniforms = torch.full((6,), 0.99, dtype=torch.float64, device=device)
    assert_greedy(sample(logits, uniforms, log_min_p=-13.0, temperature=0.0), torch.arange(6), logits)
    temperature = torch.tensor([0.0, 0.7, 0.0, 1.3, 0.0, 1.0], dtype=torch.float64, device=device)
    mixed = sample(logits, uniforms, log_min_p=-13.0, temperature=temperature)
    assert_greedy(mixed, torch.tensor([0, 2, 4]), logits)
    for row in (1, 3, 5):
        alone = sample(logits[row], uniforms[row], log_min_p=-13.0, temperature=float(temperature[row]))
        for name, value in alone._asdict().items():
            torch.testing.assert_close(getattr(mixed, name)[row], value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_detected(device: torch.device, temperature: float) -> None:
    logits = make_logits(5, 8).to(device)
    logits[0, 2], logits[1, 3], logits[2], logits[3, 1] = math.nan, math.inf, -math.inf, -math.inf
    assert finite_rows(logits).tolist() == [False, False, False, True, True]
    uniforms = torch.rand(5, dtype=torch.float64, device=device)
    got = sample(logits, uniforms, log_min_p=-6.0, temperature=temperature)
    assert got.logprobs.isnan().tolist() == [True, True, True, False, False]
    assert ((got.token_ids >= 0) & (got.token_ids < 8)).all()


@pytest.mark.parametrize("leading", [(), (0,), (2, 3)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_leading_shape(leading: tuple[int, ...], temperature: float) -> None:
    uniforms = torch.rand(leading, dtype=torch.float64)
    got = sample(torch.randn(*leading, 7), uniforms, log_min_p=-2.0, temperature=temperature)
    assert all(output.shape == leading for output in got)
    assert finite_rows(torch.randn(*leading, 7)).shape == leading


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match="uniforms"):
        sample(torch.zeros(2, 3), torch.zeros(1, dtype=torch.float64), log_min_p=-13.0, temperature=1.0)
