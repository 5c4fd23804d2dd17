"""The surrogate's negative gradient is the estimator: unbiased by complete enumeration, and equal to an independent
one."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dvp_rl.dvp.correction import correct
from dvp_rl.dvp.objective import surrogate_loss
from dvp_rl.dvp.options import Bounds, Level, Mode
from dvp_rl.dvp.policy import Constrained, constrained_logprobs, safe_set
from tests.unit.dvp import oracle

TREE = oracle.Tree(vocab=5, horizon=3)
PREFIXES = TREE.prefixes()
SEQUENCES = list(TREE.sequences())
INDEX = {prefix: i for i, prefix in enumerate(PREFIXES)}
TEMPERATURE = 0.7
TRAIN_LOG_MIN_P, INFER_LOG_MIN_P = -2.5, -5.0


def make_logits() -> tuple[Tensor, Tensor]:
    """(train, infer): the engine's logits are the trainer's with noise."""
    generator = torch.Generator().manual_seed(5)
    train = torch.randn(len(PREFIXES), TREE.vocab, dtype=torch.float64, generator=generator)
    noise = 0.3 * torch.randn(train.shape, dtype=torch.float64, generator=generator)
    return train.requires_grad_(), train.detach() + noise


def make_rewards() -> dict[tuple[int, ...], float]:
    values = np.random.default_rng(0).uniform(-0.5, 1.0, len(SEQUENCES))
    return dict(zip(SEQUENCES, values.tolist(), strict=True))


def padded(sequences: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """(token ids, prefix rows, mask), each [N, T]."""
    ids = torch.zeros(len(sequences), TREE.horizon, dtype=torch.long)
    nodes, mask = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for i, y in enumerate(sequences):
        ids[i, : len(y)] = torch.tensor(y)
        nodes[i, : len(y)] = torch.tensor([INDEX[y[:t]] for t in range(len(y))])
        mask[i, : len(y)] = True
    return ids, nodes, mask


def score(logits: Tensor, log_min_p: float, ids: Tensor, nodes: Tensor) -> Constrained:
    return constrained_logprobs(logits[nodes], ids, log_min_p=log_min_p, temperature=TEMPERATURE)


def expected_gradient(
    train: Tensor, infer: Tensor, baseline: float, level: Level, mode: Mode, bounds: Bounds, log_veto: float
) -> Tensor:
    """E_{y ~ infer}[g], summed over every sequence the engine can produce, with the functions of dvp_rl.dvp."""
    ids, nodes, mask = padded(SEQUENCES)
    infer_side = score(infer, INFER_LOG_MIN_P, ids, nodes)
    reachable = (infer_side.inside | ~mask).all(-1)
    train_side = score(train, TRAIN_LOG_MIN_P, ids, nodes)
    correction = correct(
        train_side.logprobs,
        infer_side.logprobs,
        train_side.inside,
        mask,
        level=level,
        mode=mode,
        bounds=bounds,
        cap=1.2,
        log_veto=log_veto,
    )
    probability = infer_side.logprobs.where(mask, 0.0).sum(-1).exp()
    advantages = torch.tensor(list(make_rewards().values()), dtype=torch.float64) - baseline
    loss = surrogate_loss(
        train_side.logprobs, correction.weights, advantages * probability, mask & reachable[:, None], denominator=1.0
    )
    (gradient,) = torch.autograd.grad(-loss, train)
    return gradient


def objective(train: Tensor) -> Tensor:
    """J_mp = sum_y pi_train_mp(y) R(y) by plain masked softmax, the set held constant."""
    keep = torch.from_numpy(oracle.policy(train.detach().numpy(), TRAIN_LOG_MIN_P, TEMPERATURE).keep)
    probs = (train / TEMPERATURE).masked_fill(~keep, -math.inf).softmax(-1)
    terms = [
        math.prod((probs[INDEX[y[:t]], y[t]] for t in range(len(y))), start=torch.tensor(1.0, dtype=torch.float64)) * r
        for y, r in make_rewards().items()
    ]
    return torch.stack(terms).sum()


@pytest.mark.parametrize("baseline", [0.0, 0.3])
def test_the_estimator_is_unbiased(baseline: float) -> None:
    train, infer = make_logits()
    train_set = safe_set(train, log_min_p=TRAIN_LOG_MIN_P, temperature=TEMPERATURE)
    infer_set = safe_set(infer, log_min_p=INFER_LOG_MIN_P, temperature=TEMPERATURE)
    assert (train_set <= infer_set).all()
    assert (infer_set & ~train_set).any()  # some samples are outside and get dropped
    assert not train_set.all()
    (expected,) = torch.autograd.grad(objective(train), train)
    got = expected_gradient(train, infer, baseline, Level.SEQUENCE, Mode.NONE, Bounds.UPPER, -math.inf)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


def test_ignoring_the_weights_is_biased() -> None:
    train, infer = make_logits()
    (expected,) = torch.autograd.grad(objective(train), train)
    got = expected_gradient(train, infer, 0.0, Level.SEQUENCE, Mode.UNIT, Bounds.UPPER, -math.inf)
    assert (got - expected).abs().max() > 1e-3


@pytest.mark.parametrize("log_veto", [-math.inf, -0.5])
@pytest.mark.parametrize(
    ("level", "mode", "bounds"), list(itertools.product(Level, Mode, Bounds)), ids=lambda setting: str(setting)
)
def test_with_veto_and_rejection_it_equals_an_independent_enumeration(
    level: Level, mode: Mode, bounds: Bounds, log_veto: float
) -> None:
    train, infer = make_logits()
    baseline = 0.2
    expected = oracle.expected_gradient(
        TREE,
        train.detach().numpy(),
        infer.numpy(),
        {y: r - baseline for y, r in make_rewards().items()},
        train_log_min_p=TRAIN_LOG_MIN_P,
        infer_log_min_p=INFER_LOG_MIN_P,
        temperature=TEMPERATURE,
        level=level,
        mode=mode,
        bounds=bounds,
        cap=1.2,
        log_veto=log_veto,
    )
    got = expected_gradient(train, infer, baseline, level, mode, bounds, log_veto)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-10, rtol=0)


def test_enumeration_settings_all_matter() -> None:
    """The test above would be empty if two settings gave one gradient."""
    train, infer = make_logits()
    gradients = [
        expected_gradient(train, infer, 0.2, level, mode, bounds, log_veto)
        for level, mode, bounds in itertools.product(Level, (Mode.MIS, Mode.TIS), Bounds)
        for log_veto in (-math.inf, -0.5)
    ]
    for a, b in itertools.combinations(gradients, 2):
        assert (a - b).abs().max() > 1e-6


def test_nothing_leaks_through_zero_weights_or_the_mask() -> None:
    train = torch.tensor([[math.nan, -1.0], [-1.0, math.nan], [-1.0, -2.0]], requires_grad=True)
    weights = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.5, 2.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    loss = surrogate_loss(train, weights, torch.tensor([math.inf, 1.0, -1.0]), mask, denominator=4)
    loss.backward()
    assert loss.item() == pytest.approx(-(-1.0 - (0.5 * -1.0 + 2.0 * -2.0)) / 4)
    torch.testing.assert_close(train.grad, torch.tensor([[0.0, 0.0], [-0.25, 0.0], [0.125, 0.5]]))


def test_micro_batches_add_up() -> None:
    train = torch.randn(4, 3, dtype=torch.float64)
    weights, advantages = torch.rand(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    mask = torch.rand(4, 3) > 0.3
    whole = surrogate_loss(train, weights, advantages, mask, denominator=4)
    parts = [
        surrogate_loss(*(x[rows] for x in (train, weights, advantages, mask)), denominator=4)
        for rows in ([0, 1], [2, 3])
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_an_empty_batch_has_loss_zero_and_no_denominator_is_an_error() -> None:
    empty = torch.zeros(0, 3)
    assert surrogate_loss(empty, empty, torch.zeros(0), empty.bool(), denominator=1).item() == 0
    with pytest.raises(ValueError, match="denominator 0"):
        surrogate_loss(empty, empty, torch.zeros(0), empty.bool(), denominator=0)
