"""Real products of fp8 matrices."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from dvp_lab.precision import Format, multiplies_fp8, multiply_in_fp8, rounded
from dvp_rl.contract.errors import ConfigError


class Net(torch.nn.Module):
    """As much of a model as the function reads."""

    def __init__(self, inputs: int = 64, outputs: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = torch.nn.Linear(inputs, outputs), torch.nn.Linear(outputs, 32, bias=False)
        self.bfloat16().requires_grad_(False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    @property
    def device(self) -> torch.device:
        return self.head.weight.device


def net(device: str) -> Net:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    if not multiplies_fp8(torch.device(device)):
        pytest.skip(f"PyTorch {torch.__version__} has no fp8 products on this {device}")
    return Net().to(device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", [(3, 1), (2, 5), (16, 16)], ids=str)
def test_the_error_of_a_product_is_the_rounding_to_fp8(device: str, shape: tuple[int, int]) -> None:
    model = net(device)
    x = (torch.randn(*shape, 64) * torch.logspace(-3, 2, shape[0])[:, None, None]).bfloat16()
    x[0, 0] = 0.0
    x, weight, bias = x.to(device), model.inner.weight, model.inner.bias.double()
    multiply_in_fp8(model)
    out = model.inner(x)
    assert out.dtype == torch.bfloat16
    assert out.shape == (*shape, 48)
    size = linear(x.double().abs(), weight.double().abs())
    in_bf16 = (size + bias.abs()) * 2**-8
    of_rounded = linear(rounded(x.float(), Format.FP8).double(), rounded(weight.float(), Format.FP8).double(), bias)
    assert ((out.double() - of_rounded).abs() <= in_bf16).all()
    largest = x.double().abs().amax(-1, keepdim=True) * weight.double().abs().amax(-1) * 64
    error = (out.double() - linear(x.double(), weight.double(), bias)).abs()
    assert (error <= size * (2**-3 + 2**-8) + largest * 2**-17 + in_bf16).all(), "two roundings of 3 mantissa bits"
    assert error.max() > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_lm_head_stays_in_bfloat16(device: str) -> None:
    model = net(device)
    states = torch.randn(4, 48, dtype=torch.bfloat16, device=device)
    before = model.head(states)
    multiply_in_fp8(model)
    assert torch.equal(model.head(states), before)


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 48), (64, 40)])
def test_a_layer_that_does_not_fit_is_named(inputs: int, outputs: int) -> None:
    net("cpu")
    with pytest.raises(ConfigError, match=f"inner has {inputs} inputs and {outputs} outputs, .* multiples of 16"):
        multiply_in_fp8(Net(inputs, outputs))
