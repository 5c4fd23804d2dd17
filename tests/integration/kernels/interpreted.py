"""Runs the Triton kernels without a GPU, in an environment with Triton and without pytest:

    interpreter   LM head, forward and backward, and pruning in Triton's interpreter, against the plain implementations
    compiler      each kernel compiled for compute capability 9.0

`python interpreted.py interpreter|compiler`, with the repository and its services on PYTHONPATH.
"""

from __future__ import annotations

import math
import os
import sys
from itertools import product
from typing import Any
from unittest.mock import patch

if "interpreter" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read at import

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dvp_rl.dvp import lm_head, lm_head_cuda, pruning, pruning_cuda
from dvp_rl.dvp.policy import Constrained, as_rows
from tests.kit.head_case import HeadCase

ROWS, HIDDEN, VOCAB = 23, 24, 331
SHARES = {"sparse": 1.0, "mixed": 0.05, "dense": 0.0}
CHUNKS = {"one block": 2**20, "blocks of rows": 10 * VOCAB}
PRECISIONS = {
    "float64": (torch.float64, torch.float64, 1e-12),
    "float32": (torch.float32, torch.float32, 2e-5),
    "bfloat16, weight in float32": (torch.bfloat16, torch.float32, 5e-2),
}
"""Dtype of hidden states and of the weight; largest error, relative to the largest number."""


def make_case(dtype: torch.dtype, master: torch.dtype | None = None, *, bias: bool) -> HeadCase:
    case = HeadCase.make(dtype, master, tokens=ROWS, hidden=HIDDEN, vocab=VOCAB, bias=bias)
    case.token_ids[::2] = case.logits()[::2].argmax(-1)  # inside; few of the others are
    case.log_min_p /= 2  # the interpreter takes its time for every member of S
    return case


def compute(case: HeadCase, share: float, chunk: int) -> Constrained:
    _, threshold, tau = as_rows(case.hidden, **case.rule)
    apply: Any = lm_head_cuda.KernelHeadLogprobs.apply
    return Constrained(
        *apply(case.hidden, case.weight, case.bias, case.token_ids[:, None], threshold, tau, share, chunk, True)
    )


def compare(precision: str, share: str, chunk: str, *, bias: bool) -> None:
    dtype, master, tolerance = PRECISIONS[precision]
    case = make_case(dtype, master, bias=bias)
    ours, plain = compute(case, SHARES[share], CHUNKS[chunk]), case.plain()
    assert 0 < int(plain.inside.sum()) < ROWS, "both kinds of row occur"
    assert torch.equal(ours.inside, plain.inside)
    if dtype is not torch.bfloat16:  # there, a sum may round to the other side of the threshold
        assert torch.equal(ours.kept_count, plain.kept_count)
    pairs = [(ours.logprobs, plain.logprobs), (ours.kept_mass, plain.kept_mass)]
    for actual, expected in pairs + list(zip(case.gradients(ours), case.gradients(plain), strict=True)):
        assert actual.dtype is expected.dtype
        error = float((actual.double() - expected.double()).abs().max())
        assert error <= tolerance * max(1.0, float(expected.abs().max())), (precision, share, chunk, bias, error)


def check_rows_without_a_result() -> None:
    """NaN, +inf and no finite logit; a piece of -inf among others."""
    case = make_case(torch.float64, bias=True)
    assert case.bias is not None
    with torch.no_grad():
        case.bias[: VOCAB // 2] = -torch.inf
        case.hidden[3], case.hidden[4] = torch.nan, torch.inf
    for share in SHARES.values():
        ours = compute(case, share, CHUNKS["blocks of rows"])
        assert ours.logprobs.isnan().nonzero()[:, 0].tolist() == [3, 4]
        for actual, expected in zip(ours, case.plain(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, equal_nan=True)
        assert bool((ours.kept_mass <= 1).logical_or(ours.kept_mass.isnan()).all())
    case.upstream.zero_()
    assert not any(gradient.any() for gradient in case.gradients(compute(case, 1.0, 2**20)))


def check_transposed_leaves() -> None:
    case = make_case(torch.float64, bias=False)
    case.hidden, case.weight = (leaf.detach().T.contiguous().T.requires_grad_() for leaf in (case.hidden, case.weight))
    for share, chunk in product(SHARES.values(), (2**20, 64)):  # 64: the members are added in several parts
        for actual, expected in zip(
            case.gradients(compute(case, share, chunk)), case.gradients(case.plain()), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


def check_parts_are_added_together() -> None:
    """A weight in bfloat16 would round the sum of each part."""
    case = make_case(torch.bfloat16, bias=True)
    expected = case.gradients(compute(case, 1.0, 2**20))
    with patch.object(lm_head_cuda, "MEMBERS", 1):
        in_parts = case.gradients(compute(case, 1.0, 10 * VOCAB))
    assert all(map(torch.equal, in_parts, expected))


def check_the_mass_is_at_most_one() -> None:
    case = make_case(torch.float32, bias=True)
    case.log_min_p.fill_(-torch.inf)
    assert float(compute(case, 1.0, 2**20).kept_mass.max()) == 1.0


def check_the_trial() -> None:
    """It must not depend on where the first call happens, and must not disturb it."""

    def first(hidden: Tensor, dtype: torch.dtype) -> Tensor:
        assert lm_head.kernels_on(torch.device("cpu"), dtype) is lm_head_cuda.KernelHeadLogprobs
        return hidden.exp().sin()

    hidden = torch.ones(3, requires_grad=True)
    checkpoint(first, hidden, torch.float16, use_reentrant=False).sum().backward()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        first(hidden, torch.bfloat16)
    with torch.no_grad():
        first(hidden, torch.float32)
    first(hidden, torch.float64)


def check_pruning(dtype: torch.dtype) -> None:
    """Rows with and without min_p, a tie with the threshold, and logits that are not finite."""
    rows = 12
    logits = (4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))).to(dtype)
    min_ps = torch.tensor([math.exp(-13.0), math.exp(-3.0), 0.3, 0.0] * (rows // 4))
    temperatures = torch.tensor([[0.5], [1.0], [1.5]] * (rows // 3))
    logits[0, 7:], logits[1, 3], logits[2, 5], logits[4, :40] = -torch.inf, torch.nan, torch.inf, -torch.inf
    logits[5], logits[7, 9] = -torch.inf, torch.nan
    logits[8], logits[8, :3] = -40.0, torch.tensor([2.0, 2.0 - 13 * 1.5, 2.0 - 13 * 1.5 - 0.25])
    expected, wider = logits.clone(), torch.full((rows, 2 * VOCAB), 7.0, dtype=dtype)
    ours = wider[:, ::2]  # with strides
    ours.copy_(logits)
    kept = pruning_cuda.prune_in_kernel(ours, min_ps, temperatures)
    plain = pruning.prune_in_blocks(expected, min_ps, temperatures)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    assert (wider[:, 1::2] == 7.0).all(), "writes nothing beside its logits"
    assert torch.equal(kept[1], plain[1]), (kept[1], plain[1])
    assert kept[1, [1, 2, 3, 5, 7, 11]].tolist() == [0.0] * 6
    assert kept[1, 8] == 2, "the tie stays"
    pruned = kept[1] > 0
    torch.testing.assert_close(kept[0, pruned], plain[0, pruned], rtol=0, atol=1e-6)


def interpret() -> None:
    # A small vocabulary, for time, has several groups of pieces, and blocks are rounded.
    lm_head_cuda.PIECE, lm_head_cuda.GROUP, lm_head_cuda.ROWS = 64, 2, 2
    for precision, share, chunk, bias in product(PRECISIONS, SHARES, CHUNKS, (True, False)):
        compare(precision, share, chunk, bias=bias)
    check_rows_without_a_result()
    check_transposed_leaves()
    check_parts_are_added_together()
    check_the_mass_is_at_most_one()
    check_the_trial()
    pruning_cuda.BLOCK = 64
    for dtype in (torch.float32, torch.bfloat16):
        check_pruning(dtype)


def compile_all() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for logit, number in (("*bf16", "*fp32"), ("*fp32", "*fp32"), ("*fp64", "*fp64")):
        types = dict.fromkeys(("logits", "tile", "source", "into"), logit) | {"token_ids": "*i64"}
        types |= dict.fromkeys(("threshold", "tau", "tops", "masses", "peak", "kept", "total"), number)
        types |= dict.fromkeys(("weight", "slope", "share", "value", "upstream"), number)
        types |= dict.fromkeys(("min_ps", "temperatures", "kept_values"), "*fp32")
        types |= dict.fromkeys(("counts", "size", "number", "starts", "ends", "num_found"), "*i32")
        types |= dict.fromkeys(("column", "index", "key"), "*i32") | {"inside": "*i1"}
        types |= dict.fromkeys(
            ("vocab", "pieces", "rows", "groups", "room", "width", "first", "row_stride", "stride"), "i32"
        )
        sizes = {name: getattr(lm_head_cuda, name) for name in ("PIECES", "PIECE", "GROUP", "ENTRIES", "HIDDEN")}
        sizes |= {"ALL": 512, "GROUPS": 16, "FRESH": False, "GRID": pruning.GRID, "ROUNDING": pruning.ROUNDING}
        for module, block in ((lm_head_cuda, lm_head_cuda.COLUMNS), (pruning_cuda, pruning_cuda.BLOCK)):
            sizes["BLOCK"] = block
            kernels = [each for each in vars(module).values() if isinstance(each, triton.JITFunction)]
            assert kernels
            for kernel in kernels:
                names = kernel.arg_names
                fixed = {(names.index(key),): value for key, value in sizes.items() if key in names}
                source = ASTSource(kernel, {key: types.get(key, "constexpr") for key in names}, fixed)
                assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"], kernel


if __name__ == "__main__":
    {"interpreter": interpret, "compiler": compile_all}[sys.argv[1]]()
    sys.stdout.write("ok\n")
