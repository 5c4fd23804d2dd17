"""The LM-head operation against the plain implementation: all logits first, then the constrained policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dvp_rl.dvp.lm_head import head_logprobs, kernels_on
from dvp_rl.dvp.policy import Constrained, constrained_logprobs
from dvp_rl.engines.model_folder import has_linear_head
from tests.kit.devices import DEVICES
from tests.kit.head_case import HeadCase
from tests.kit.models import make_model

TOKENS, HIDDEN, VOCAB = 37, 16, 97
SPARSE, MIXED, DENSE = 1.0, 0.05, 0.0
"""Values of max_share, the share of the vocabulary that a row may keep for the sparse backward."""


@dataclass
class Case(HeadCase):
    kernels: bool

    def ours(self, *, max_share: float, chunk: int | None) -> Constrained:
        return head_logprobs(
            self.hidden,
            self.weight,
            self.bias,
            self.token_ids,
            **self.rule,
            max_share=max_share,
            chunk=chunk,
            kernels=self.kernels,
        )


@pytest.fixture(params=[*DEVICES, *("cuda without kernels" for device in DEVICES if device == "cuda")])
def make_case(request: pytest.FixtureRequest) -> Callable[..., Case]:
    """Makes cases on a device. On a GPU the Triton kernels compute them, or do not."""
    device, _, without = request.param.partition(" ")
    kernels = device == "cuda" and not without

    def make(dtype: torch.dtype = torch.float64, *, master: torch.dtype | None = None, bias: bool = True) -> Case:
        assert not kernels or kernels_on(torch.device(device), dtype) is not None
        sizes = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB}
        return Case.make(dtype, master, **sizes, bias=bias, device=device, kernels=kernels)

    return make


@pytest.mark.parametrize("chunk", [None, 10 * VOCAB, 20])
@pytest.mark.parametrize("max_share", [SPARSE, MIXED, DENSE])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_equal_the_plain_ones(
    make_case: Callable[..., Case], bias: bool, max_share: float, chunk: int | None
) -> None:
    case = make_case(bias=bias)
    ours, plain = case.ours(max_share=max_share, chunk=chunk), case.plain()
    assert 0 < int(ours.inside.sum()) < TOKENS  # both kinds of row occur
    assert torch.equal(ours.kept_count, plain.kept_count)
    assert torch.equal(ours.inside, plain.inside)
    torch.testing.assert_close(ours.logprobs, plain.logprobs, rtol=0, atol=1e-13)
    torch.testing.assert_close(ours.kept_mass, plain.kept_mass, rtol=0, atol=1e-14)
    for actual, expected in zip(case.gradients(ours), case.gradients(plain), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("max_share", [SPARSE, MIXED, DENSE])
@pytest.mark.parametrize(
    ("dtype", "master", "tolerance"),
    [
        (torch.float32, torch.float32, 5e-6),
        (torch.bfloat16, torch.float32, 5e-2),
        (torch.bfloat16, torch.bfloat16, 5e-2),
    ],
)
def test_low_precision_equals_the_plain_implementation_within_its_rounding(
    make_case: Callable[..., Case], dtype: torch.dtype, master: torch.dtype, tolerance: float, max_share: float
) -> None:
    case = make_case(dtype, master=master, bias=False)
    ours, plain = case.ours(max_share=max_share, chunk=10 * VOCAB), case.plain()
    assert ours.logprobs.dtype is torch.float32
    torch.testing.assert_close(ours.logprobs, plain.logprobs, rtol=0, atol=tolerance)
    for leaf, actual, expected in zip(case.leaves, case.gradients(ours), case.gradients(plain), strict=True):
        assert actual.dtype is leaf.dtype
        torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("max_share", [SPARSE, MIXED, DENSE])
def test_the_gradient_is_that_of_finite_differences(make_case: Callable[..., Case], max_share: float) -> None:
    case = make_case()
    inside = case.plain().inside.nonzero()[:6, 0]  # off the set the log-prob is a placeholder without gradient

    def logprobs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return head_logprobs(
            hidden,
            weight,
            bias,
            case.token_ids[inside],
            log_min_p=case.log_min_p[inside],
            temperature=case.temperature[inside],
            max_share=max_share,
            chunk=4 * VOCAB,
            kernels=case.kernels,
        ).logprobs

    leaves = [case.hidden.detach()[inside].requires_grad_(), case.weight, case.bias]
    assert torch.autograd.gradcheck(logprobs, leaves, fast_mode=True)


@pytest.mark.parametrize("max_share", [SPARSE, MIXED, DENSE])
def test_rows_without_slope_are_not_touched_by_the_backward(make_case: Callable[..., Case], max_share: float) -> None:
    """Otherwise a NaN in the hidden states of a dropped sequence would spread over the head's gradient."""
    case = make_case(bias=False)
    dropped = torch.arange(TOKENS, device=case.hidden.device) % 3 == 0
    case.upstream[dropped] = 0
    _, expected = case.gradients(case.plain())
    with torch.no_grad():
        case.hidden[dropped] = torch.nan
    hidden, weight = case.gradients(case.ours(max_share=max_share, chunk=10 * VOCAB))
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-13)
    assert not hidden[dropped].any()


@pytest.mark.parametrize("max_share", [SPARSE, DENSE])
@pytest.mark.parametrize("chunk", [None, 20])
def test_logits_that_are_not_finite_are_treated_as_in_the_plain_implementation(
    make_case: Callable[..., Case], chunk: int | None, max_share: float
) -> None:
    """-inf is a token of probability zero, even if it fills a tile; a row with NaN or +inf has no log-prob."""
    case = make_case()
    assert case.bias is not None
    with torch.no_grad():
        case.bias[16:48] = -torch.inf
        case.hidden[3] = torch.nan
        case.hidden[4] = torch.inf
    ours, plain = case.ours(max_share=max_share, chunk=chunk), case.plain()
    assert ours.logprobs.isnan().nonzero()[:, 0].tolist() == [3, 4]
    for actual, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13, equal_nan=True)


def test_nothing_is_kept_for_a_backward_that_will_not_come(make_case: Callable[..., Case]) -> None:
    case = make_case()
    with torch.no_grad():
        ours = case.ours(max_share=SPARSE, chunk=None)
    torch.testing.assert_close(ours.logprobs, case.plain().logprobs, rtol=0, atol=1e-13)
    assert ours.logprobs.grad_fn is None


@pytest.mark.parametrize("token_id", [-100, VOCAB])
def test_a_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    """On a GPU, PyTorch stops the process."""
    case = Case.make(torch.float64, tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, kernels=False)
    case.token_ids[3] = token_id
    with pytest.raises(IndexError, match=rf"{token_id}.* in a vocabulary of {VOCAB}"):
        case.ours(max_share=SPARSE, chunk=None)


def test_no_tokens(make_case: Callable[..., Case]) -> None:
    case = make_case()
    own = head_logprobs(case.hidden[:0], case.weight, case.bias, case.token_ids[:0], log_min_p=-1.0, temperature=1.0)
    gradients = torch.autograd.grad(own.logprobs.sum(), case.leaves)
    assert own.logprobs.shape == (0,)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_trains_alike_through_either_route(device: torch.device, tmp_path: Path, tied: bool) -> None:
    folder = make_model(tmp_path, tied=tied, spread=2.0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).to(device)
    twin = copy.deepcopy(model)
    ids = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0)).to(device)
    settings = {"log_min_p": -2.0, "temperature": 0.9}
    targets = ids[:, 1:].flatten()

    assert has_linear_head(model)
    head = model.get_output_embeddings()
    states = model.base_model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    head_logprobs(states, head.weight, None, targets, **settings).logprobs.sum().backward()
    logits = twin(input_ids=ids).logits[:, :-1].flatten(0, 1)
    constrained_logprobs(logits, targets, **settings).logprobs.sum().backward()

    for (name, ours), plain in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=1e-11, msg=name)


def test_a_soft_cap_behind_the_head_is_noticed(tmp_path: Path) -> None:
    capped = make_model(tmp_path, "gemma2", final_logit_softcapping=30.0)
    assert not has_linear_head(AutoModelForCausalLM.from_pretrained(capped, dtype=torch.float32))
