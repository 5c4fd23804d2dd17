"""The two safe sets, checked against sums written out one position at a time."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch

from dvp_lab.rules import NOTHING_PRUNED, Rule
from dvp_lab.sets import Sets, joined, mass_per_nat, seen_of, sets_of
from dvp_lab.sources import Samples, Trace

N, T, V = 40, 12, 400


def one_position(**values: float) -> Sets:
    """The sets of one sequence with one position; fields that are not given are 1."""
    one = torch.ones(1, 1, dtype=torch.float64)
    named = {field.name: values.get(field.name, 1.0) * one for field in fields(Sets) if field.name != "mask"}
    return Sets(mask=one.bool(), **named)


def sampled(s: float, rule: Rule, seed: int = 0) -> Trace:
    """A trace: engine logits with noise s, tokens drawn from its constrained policy, one row cut short."""
    torch.manual_seed(seed)
    train = 2 * torch.randn(N, T, V, dtype=torch.float64)
    infer = train + s * torch.randn_like(train)
    threshold = torch.as_tensor(rule(infer), dtype=torch.float64).expand(N, T)[..., None]
    kept = infer.masked_fill(infer - infer.amax(-1, keepdim=True) < threshold, -math.inf)
    tokens = torch.distributions.Categorical(logits=kept).sample()
    logprobs = kept.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    mask = torch.ones(N, T, dtype=torch.bool)
    mask[0, 5:] = False
    return Trace(Samples(tokens, mask, logprobs, infer), train)


@pytest.mark.parametrize("rule", [Rule(-2.0), Rule(-5.0), Rule(-1.0, 0.7), NOTHING_PRUNED], ids=lambda rule: rule.label)
def test_every_number_is_that_of_the_definition(rule: Rule) -> None:
    trace = sampled(0.3, rule)
    found = joined([sets_of(trace, rule)])
    for row, t in ((0, 0), (3, 7), (39, 11)):
        z, y = trace.train_logits[row, t], trace.samples.logits[row, t]  # type: ignore[index]
        p, q = z.softmax(-1), y.softmax(-1)
        H = [-(w * w.log()).sum() for w in (p, q)]
        limits = [min(0.0, rule.log_min_p - rule.slope * float(h)) for h in H]
        ours, theirs = (
            {int(a) for a in (w - w.max() >= limit).nonzero()} for w, limit in ((z, limits[0]), (y, limits[1]))
        )
        both = ours & theirs
        assert found.entropy[row, t] == pytest.approx(float(H[0]))
        assert found.overlap[row, t] == pytest.approx(len(both) / len(ours))
        assert (found.train_count[row, t], found.infer_count[row, t]) == (len(ours), len(theirs))
        mass = {name: float(sum(w[a] for a in kept)) for name, w, kept in (("p", p, ours), ("q", q, theirs))}
        assert found.train_mass[row, t] == pytest.approx(mass["p"])
        assert found.infer_mass[row, t] == pytest.approx(mass["q"])
        outside = sum(float(q[a]) for a in theirs - ours) / mass["q"]
        assert found.outside[row, t] == pytest.approx(outside, abs=1e-12)
        kept_q, kept_p = (w[sorted(both)] / w[sorted(both)].sum() for w in (q, p))
        assert found.kl[row, t] == pytest.approx(float((kept_q * (kept_q / kept_p).log()).sum()))
        assert found.kl_full[row, t] == pytest.approx(float((q * (q / p).log()).sum()))
    assert (found.overlap[0, 5:] == 0).all()
    assert found.mean("mask").value == 1.0


def test_the_outside_rate_is_predicted_from_noise_and_density() -> None:
    """The prediction 0.56 s x mass per nat holds for iid noise where the density is smooth."""
    rule = Rule(-3.0)
    found = sets_of(sampled(0.1, rule), rule)
    exact, predicted = found.mean("outside"), found.mean("outside_predicted").value
    assert predicted == pytest.approx(exact.value, rel=0.1)


def test_the_veto_is_what_the_exact_probabilities_expect() -> None:
    rule = Rule(-2.0)
    parts = [(sampled(0.3, rule, seed)) for seed in range(5)]
    expected = joined(sets_of(part, rule) for part in parts).vetoed("outside")
    outcome = joined(seen_of(part, rule) for part in parts).outcome()
    assert 0.1 < expected < 0.9, "the case is not trivial"
    assert outcome.veto_outside.value == pytest.approx(expected, abs=3 * math.sqrt(expected * (1 - expected) / (5 * N)))
    assert outcome.veto_outside.value <= outcome.veto.value
    assert outcome.veto.value + outcome.mis.value < 1
    assert 0 < outcome.kept_weight.value < 1


def test_without_pruning_nothing_is_outside() -> None:
    trace = sampled(0.3, NOTHING_PRUNED)
    found, outcome = sets_of(trace, NOTHING_PRUNED), seen_of(trace, NOTHING_PRUNED).outcome()
    assert found.vetoed("outside") == 0
    assert found.mean("overlap").value == 1
    assert (outcome.veto_outside.value, outcome.pruned.value) == (0, pytest.approx(0, abs=1e-9))
    assert torch.allclose(found.kl, found.kl_full)


def test_the_mass_per_nat_is_a_density() -> None:
    """Summed over all thresholds, it is the mass at least half a nat below the top."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(5, 300, dtype=torch.float64)
    total = sum(mass_per_nat(logits, Rule(-float(nats))) for nats in range(1, 30))
    distance = logits - logits.amax(-1, keepdim=True)
    assert torch.allclose(total, (logits.softmax(-1) * (distance <= -0.5)).sum(-1))  # type: ignore[arg-type]


def test_a_rule_by_entropy_prunes_less_where_the_model_is_unsure() -> None:
    logits = torch.stack((torch.linspace(0, -40, 100), torch.linspace(0, -1, 100))).double()
    limits = Rule(-2.0, 0.5)(logits)
    assert isinstance(limits, torch.Tensor)
    assert limits[1] < limits[0] < -2.0
    assert (Rule(-2.0, -10.0)(logits) <= 0).all()  # type: ignore[operator]
    assert [rule.nats for rule in (Rule(-3.0), NOTHING_PRUNED)] == ["3", "∞"]
    assert [rule.label for rule in (Rule(-3.0), Rule(-2.0, 0.5), NOTHING_PRUNED)] == ["e⁻³", "exp(−2 − 0.5 H)", "0"]
