"""Every metric against its formula in float64 NumPy, one sequence and one token at a time."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dvp_rl.dvp.correction import correct
from dvp_rl.dvp.evidence import Evidence
from dvp_rl.dvp.metrics import MetricBatch, effective_sample_size, mis_health, mismatch_metrics, set_overlap
from dvp_rl.dvp.options import Level, Mode
from dvp_rl.dvp.policy import Constrained, safe_set

N, T, CAP = 40, 7, 1.3


def make_batch(level: Level = Level.SEQUENCE, mode: Mode = Mode.MIS, shape: tuple[int, int] = (N, T)) -> MetricBatch:
    """A batch with lengths 1..T, some outside tokens, a token far off, a NaN row, and NaN off the mask."""
    n, length = shape
    generator = torch.Generator().manual_seed(11)
    infer = -torch.rand(shape, generator=generator) * 4
    train = infer + 0.4 * torch.randn(shape, generator=generator)
    inside = torch.rand(shape, generator=generator) > 0.03
    train = train.where(inside, -52.0)
    mask = torch.arange(length) < (torch.arange(n) % max(length, 1) + 1)[:, None]
    if n and length:
        train[5, 0], inside[5, 0] = math.nan, False
        train[6, 0], inside[6, 0] = -12.0, True
        train = train.where(mask, math.nan)
    mass = [0.8 + 0.2 * torch.rand(shape, generator=generator) for _ in range(2)]
    mass[1] = mass[1].where(mass[1] < 0.95, 1.0)
    mass[0] = mass[0].where(train.isfinite() | ~mask, math.nan)
    counts = [torch.randint(1, 99, shape, generator=generator, dtype=torch.int32) for _ in range(2)]
    seen = Evidence(
        torch.arange(n),
        mask,
        Constrained(train, mass[0], counts[0], inside),
        Constrained(infer, mass[1], counts[1], torch.ones_like(inside)),
    )
    return MetricBatch(
        seen,
        advantages=torch.randn(n, generator=generator),
        rewards=torch.rand(n, generator=generator),
        correction=correct(train, infer, inside, mask, level=level, mode=mode, cap=CAP),
        level=level,
        cap=CAP,
    )


def seen_with(batch: MetricBatch, **train: Tensor) -> MetricBatch:
    """The batch with other train-side fields and the resulting correction."""
    seen = dataclasses.replace(batch.seen, train=batch.seen.train._replace(**train))
    correction = correct(seen.train.logprobs, seen.infer.logprobs, seen.train.inside, seen.mask)
    return dataclasses.replace(batch, seen=seen, correction=correction)


def as_float64(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


class Tokens:
    """The batch as plain lists: `rows[i]` are the token positions of sequence i that count."""

    def __init__(self, batch: MetricBatch) -> None:
        self.l = as_float64(batch.seen.train.logprobs - batch.seen.infer.logprobs)
        self.model = [[t for t in range(T) if batch.seen.mask[i, t]] for i in range(N)]
        self.rows = [
            [t for t in row if batch.seen.train.inside[i, t] and not math.isnan(self.l[i, t])]
            for i, row in enumerate(self.model)
        ]
        self.pairs = [(i, t) for i, row in enumerate(self.rows) for t in row]
        self.model_pairs = [(i, t) for i, row in enumerate(self.model) for t in row]
        self.flat = np.array([self.l[pair] for pair in self.pairs])

    def weights(self, level: Level, rows: list[list[int]]) -> list[float]:
        """Weights per token, or per sequence with a token that counts."""
        if level is Level.TOKEN:
            return [math.exp(np.clip(self.l[i, t], -20, 20)) for i, row in enumerate(rows) for t in row]
        reduce = np.mean if level is Level.GEOMETRIC else np.sum
        return [math.exp(np.clip(reduce([self.l[i, t] for t in row]), -20, 20)) for i, row in enumerate(rows) if row]


def test_divergence() -> None:
    batch = make_batch()
    tokens, got = Tokens(batch), mismatch_metrics(batch)
    flat, ratio = tokens.flat, np.exp(tokens.flat)
    advantages = np.array([float(batch.advantages[i]) for i, _ in tokens.pairs])
    sequence = np.array(tokens.weights(Level.SEQUENCE, tokens.rows))
    outside = [pair for pair in tokens.model_pairs if not batch.seen.train.inside[pair]]
    assert 0 < len(outside) < len(tokens.model_pairs)
    full = {}
    for name in ("train", "infer"):
        side = getattr(batch.seen, name)
        inside = [pair for pair in tokens.model_pairs if batch.seen.train.inside[pair]]
        full[name] = np.mean([float(side.logprobs[pair]) + math.log(float(side.kept_mass[pair])) for pair in inside])
    expected = {
        "kl": -flat.mean(),
        "k3_kl": (ratio - 1 - flat).mean(),
        "chi2_token": (ratio**2).mean() - 1,
        "chi2_seq": (sequence**2).mean() - 1,
        "ppl_train": math.exp(-np.mean([float(batch.seen.train.logprobs[pair]) for pair in tokens.pairs])),
        "ppl_infer": math.exp(-np.mean([float(batch.seen.infer.logprobs[pair]) for pair in tokens.pairs])),
        "ppl_ratio": math.exp(-flat.mean()),
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
        "skew": (-(ratio - 1) * advantages).mean(),
        "skew_positive": (-(ratio - 1) * advantages)[advantages > 0].mean(),
        "skew_negative": (-(ratio - 1) * advantages)[advantages < 0].mean(),
        "outside_rate": len(outside) / len(tokens.model_pairs),
        "kl_unmasked": full["infer"] - full["train"],
    }
    assert {name for name in got if name.startswith("mismatch/")} == {f"mismatch/{name}" for name in expected}
    for name, value in expected.items():
        assert got[f"mismatch/{name}"] == pytest.approx(value, rel=1e-6), name
    assert got["mismatch/ppl_ratio"] == pytest.approx(got["mismatch/ppl_train"] / got["mismatch/ppl_infer"], rel=1e-6)


@pytest.mark.parametrize("level", list(Level))
def test_weights_before_rejection(level: Level) -> None:
    batch = make_batch(level)
    tokens, got = Tokens(batch), mismatch_metrics(batch)
    w = np.array(tokens.weights(level, tokens.rows))
    assert got["weight/ess"] == pytest.approx(1 / np.mean((w / w.mean()) ** 2), rel=1e-6)
    assert 1 / len(w) <= got["weight/ess"] <= 1
    assert got["weight/max"] == pytest.approx(w.max(), rel=1e-6)
    assert got["weight/min"] == pytest.approx(w.min(), rel=1e-6)
    assert got["weight/mean"] == pytest.approx(w.mean(), rel=1e-6)


@pytest.mark.parametrize(("level", "mode"), list(itertools.product(Level, Mode)), ids=str)
def test_veto_and_rejection(level: Level, mode: Mode) -> None:
    batch = make_batch(level, mode)
    tokens, got = Tokens(batch), mismatch_metrics(batch)
    reasons = []
    for i, row in enumerate(tokens.model):
        if any(math.isnan(tokens.l[i, t]) for t in row):
            reasons.append("nan")
        elif any(not batch.seen.train.inside[i, t] for t in row):
            reasons.append("outside")
        elif any(tokens.l[i, t] < math.log(1e-4) for t in row):
            reasons.append("numerical")
        else:
            reasons.append("")
    for reason in ("nan", "outside", "numerical"):
        assert reason in reasons
        assert got[f"veto/{reason}"] == pytest.approx(reasons.count(reason) / N)
    assert got["veto/total"] == pytest.approx(1 - reasons.count("") / N)
    weights = tokens.weights(level, tokens.model)
    owners = [i for i, _ in tokens.model_pairs] if level is Level.TOKEN else list(range(N))
    clean = [not reasons[i] for i in owners]
    kept = [ok and (mode is not Mode.MIS or w <= CAP) for ok, w in zip(clean, weights, strict=True)]
    rejected = sum(clean) - sum(kept)
    assert (rejected > 0) == (mode is Mode.MIS)
    assert got["mis/fraction"] == pytest.approx(rejected / len(owners))
    expected = sum(w for w, keep in zip(weights, kept, strict=True) if keep) / len(owners)
    assert got["mis/kept_weight"] == pytest.approx(expected, rel=1e-6)


def test_pruning_and_entropy() -> None:
    batch = make_batch()
    tokens, got = Tokens(batch), mismatch_metrics(batch)
    for side in ("train", "infer"):
        mass = [float(getattr(batch.seen, side).kept_mass[pair]) for pair in tokens.model_pairs]
        known = [m for m in mass if not math.isnan(m)]
        assert len(known) == len(mass) - (side == "train")
        assert got[f"kept/mass_mean_{side}"] == pytest.approx(np.mean(known))
        assert got[f"kept/mass_min_{side}"] == pytest.approx(min(known))
        counts = [int(getattr(batch.seen, side).kept_count[pair]) for pair in tokens.model_pairs]
        assert got[f"kept/count_mean_{side}"] == pytest.approx(np.mean(counts))
    mass = [float(batch.seen.infer.kept_mass[pair]) for pair in tokens.model_pairs]
    assert got["pruned/mass"] == pytest.approx(1 - np.mean(mass))
    assert got["pruned/share"] == pytest.approx(np.mean([m <= 0.999 for m in mass]))
    assert 0 < got["pruned/share"] < 1
    drawn = [float(batch.seen.infer.logprobs[pair]) for pair in tokens.model_pairs]
    assert got["entropy/constrained"] == pytest.approx(-np.mean(drawn))


@pytest.mark.parametrize("shift", [0.0, -0.5, -3.0])
def test_bias_bounds(shift: float) -> None:
    batch = make_batch()
    batch = dataclasses.replace(batch, rewards=batch.rewards + shift)
    tokens, got = Tokens(batch), mismatch_metrics(batch)
    rewards = as_float64(batch.rewards)
    pruned = [
        [1 - float(batch.seen.train.kept_mass[i, t]) for t in row if not batch.seen.train.kept_mass[i, t].isnan()]
        for i, row in enumerate(tokens.model)
    ]
    sides = 2 if rewards.min() < 0 else 1
    bound = sides * np.abs(rewards).max() * max(map(len, pruned)) * max(max(row) for row in pruned if row)
    measured = (rewards.max() - rewards.min()) * np.mean([sum(row) for row in pruned if row])
    assert got["bias/bound"] == pytest.approx(bound, rel=1e-6)
    assert got["bias/bound_measured"] == pytest.approx(measured, rel=1e-6)


def test_predicted_health_is_of_the_measured_kl() -> None:
    batch = make_batch()
    tokens, got = Tokens(batch), mismatch_metrics(batch)
    length = np.mean([len(row) for row in tokens.rows if row])
    expected = mis_health(-tokens.flat.mean(), float(length), CAP)
    for name, value in expected._asdict().items():
        assert got[f"mis/predicted_{name}"] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize(("x", "share"), [(0.3, 0.98), (0.7, 0.65), (1.0, 0.46), (2.0, 0.17)])
def test_two_sided_keep_rates_as_published(x: float, share: float) -> None:
    assert mis_health(x**2 / 2, 1.0, 2.0).keep_two_sided == pytest.approx(share, abs=0.006)


def test_kept_weight_as_published() -> None:
    assert mis_health(5e-4, 2304, 2.0).kept_weight_upper == pytest.approx(0.38, abs=0.005)
    assert mis_health(math.log(2), 1, 2.0).kept_weight_upper == pytest.approx(0.5)
    lowest = min(mis_health(k, 1.0, 2.0).keep_upper for k in np.linspace(1e-3, 20, 2000))
    assert lowest == pytest.approx(0.88, abs=0.005)


@pytest.mark.parametrize("K", [0.05, 0.7, 2.0])
def test_health_is_that_of_a_lognormal_weight(K: float) -> None:
    logs = np.random.default_rng(0).normal(-K, math.sqrt(2 * K), 2_000_000)
    w, got = np.exp(logs), mis_health(K, 1.0, 2.0)
    upper, both = w <= 2, (w <= 2) & (w >= 0.5)
    np.testing.assert_allclose(
        [got.keep_upper, got.keep_two_sided, got.kept_weight_upper, got.kept_weight_two_sided],
        [upper.mean(), both.mean(), (w * upper).mean(), (w * both).mean()],
        atol=2e-3,
    )


def test_no_measured_divergence_keeps_everything() -> None:
    assert mis_health(-1e-5, 100, 2.0) == (0.0, 1.0, 1.0, 1.0, 1.0)


def test_on_policy_is_clean() -> None:
    batch = make_batch()
    same = torch.full((N, T), -1.0)
    inside = torch.ones(N, T, dtype=torch.bool)
    infer = dataclasses.replace(batch.seen, infer=batch.seen.infer._replace(logprobs=same))
    got = mismatch_metrics(seen_with(dataclasses.replace(batch, seen=infer), logprobs=same, inside=inside))
    zero = ("kl", "k3_kl", "chi2_token", "chi2_seq", "skew", "outside_rate")
    assert all(got[f"mismatch/{name}"] == 0 for name in zero)
    assert got["weight/ess"] == got["mis/kept_weight"] == got["mismatch/ppl_ratio"] == 1
    assert got["veto/total"] == got["mis/fraction"] == 0


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0)])
def test_an_empty_batch_has_no_metrics(shape: tuple[int, int], level: Level) -> None:
    assert mismatch_metrics(make_batch(level, shape=shape)) == {}


@pytest.mark.parametrize("level", list(Level))
def test_a_batch_with_nothing_kept_is_still_measured(level: Level) -> None:
    batch = make_batch(level)
    correction = correct(
        batch.seen.train.logprobs, batch.seen.infer.logprobs, batch.seen.train.inside, batch.seen.mask, log_veto=99.0
    )
    got = mismatch_metrics(dataclasses.replace(batch, correction=correction))
    assert got["veto/total"] == 1
    assert got["mis/kept_weight"] == 0
    assert got["mismatch/kl"] == mismatch_metrics(batch)["mismatch/kl"]


def test_a_batch_with_every_token_outside_reports_that_alone() -> None:
    batch = make_batch()
    nowhere = torch.zeros(N, T, dtype=torch.bool)
    got = mismatch_metrics(seen_with(batch, inside=nowhere))
    assert got["mismatch/outside_rate"] == 1
    assert "mismatch/kl" not in got
    assert all(math.isfinite(value) for value in got.values())


def test_set_overlap() -> None:
    train = torch.tensor([[True, True, False, True], [True, False, False, False]])
    infer = torch.tensor([[True, False, True, True], [True, True, True, True]])
    torch.testing.assert_close(set_overlap(train, infer), torch.tensor([2 / 3, 1.0]))
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(0)) * 5
    same = safe_set(logits, log_min_p=-6.0, temperature=1.0)
    assert (set_overlap(same, same) == 1).all()


def test_effective_sample_size_at_its_ends() -> None:
    assert effective_sample_size(torch.full((8,), 3.0)).item() == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([5.0, 0, 0, 0])).item() == pytest.approx(0.25)
