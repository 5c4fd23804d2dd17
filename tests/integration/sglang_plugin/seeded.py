"""Runs in SGLang's environment: its own sampler, with the plugin, on seeded rows with and without min_p.

A CPU server refuses `--enable-deterministic-inference`, without which SGLang ignores seeds; its sampler does not, given
the hash that is a compiled kernel. Exits with an AssertionError if something does not hold.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.layers.sampler import Sampler
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

ROWS, VOCAB = 64, 300
LOG_MIN_P = -2.0
HASH = torch.library.Library("sgl_kernel", "FRAGMENT")
HASH.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")


def hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Another hash than SGLang's, of the same kind: 32 bits from (seed, position, column)."""
    mixed = (seed.long() * 0x9E3779B1 + positions.long() * 0x85EBCA77).unsqueeze(-1) + columns.long() * 0xC2B2AE3D
    for multiplier in (0x2545F491, 0x27D4EB2F):
        mixed = ((mixed ^ (mixed >> 15)) * multiplier) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)).to(torch.uint32)


HASH.impl("murmur_hash32_cpu", hash32, "CPU")


def make_sampler() -> Sampler:
    """Without the distributed state that its constructor wants."""
    sampler = Sampler.__new__(Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.rl_on_policy_target = None
    sampler.enable_deterministic = sampler.use_log_softmax_logprob = sampler.use_ascend_backend = False
    sampler.output_logprob_processor = OutputLogprobProcessor()
    return sampler


def make_info(min_ps: Tensor) -> SamplingBatchInfo:
    return SamplingBatchInfo(
        temperatures=torch.linspace(0.5, 1.5, ROWS).view(-1, 1),
        top_ps=torch.ones(ROWS),
        top_ks=torch.full((ROWS,), 1 << 30, dtype=torch.int32),
        min_ps=min_ps,
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=bool(min_ps.any()),
        vocab_size=VOCAB,
        sampling_seed=torch.arange(ROWS),
        device="cpu",
    )


def draw(forward: Any, logits: Tensor, min_ps: Tensor) -> tuple[Tensor, Tensor, Any]:
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    nothing: list[Any] = [None] * ROWS
    token_ids = forward(make_sampler(), output, make_info(min_ps), True, [0] * ROWS, nothing, torch.arange(ROWS))
    return token_ids.long(), output.next_token_logprobs, output.customized_info


def main() -> None:
    load_plugins()
    logits = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    min_ps = torch.zeros(ROWS)
    min_ps[::2] = torch.tensor(LOG_MIN_P).exp()
    token_ids, logprobs, info = draw(Sampler.forward, logits, min_ps)
    again = draw(Sampler.forward, logits, min_ps)
    assert torch.equal(token_ids, again[0])
    assert torch.equal(logprobs, again[1])

    stock_ids, stock_logprobs, _ = draw(Sampler.forward.__wrapped__, logits, torch.zeros(ROWS))
    assert torch.equal(token_ids[1::2], stock_ids[1::2])
    assert torch.equal(logprobs[1::2], stock_logprobs[1::2])
    assert not torch.equal(token_ids[::2], stock_ids[::2])

    scaled = logits.double() / torch.linspace(0.5, 1.5, ROWS).view(-1, 1)
    keep = scaled >= scaled.amax(-1, keepdim=True) + LOG_MIN_P
    exact = scaled - scaled.masked_fill(~keep, -torch.inf).logsumexp(-1, keepdim=True)
    rows = torch.arange(0, ROWS, 2)
    assert keep[rows, token_ids[rows]].all()
    torch.testing.assert_close(logprobs[rows].double(), exact[rows, token_ids[rows]], atol=1e-5, rtol=0)
    assert [info["kept_count"][row] for row in range(ROWS)] == [
        None if row % 2 else int(count) for row, count in enumerate(keep.sum(-1))
    ]


if __name__ == "__main__":
    main()
