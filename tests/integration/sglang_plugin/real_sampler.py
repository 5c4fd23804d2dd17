"""Runs in SGLang's environment: tests SGLang's sampler with the plugin on paths that a CPU server cannot reach.

Seeds: a CPU server refuses `--enable-deterministic-inference`, without which SGLang ignores them; the sampler itself
takes them, given a stand-in for the hash, which is a compiled kernel. Custom logit processors reach a server as
pickles; here they are functions. Exits with an AssertionError if a check fails.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.layers.sampler import Sampler
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from torch import Tensor

ROWS, VOCAB = 64, 300
LOG_MIN_P = -2.0
HASH = torch.library.Library("sgl_kernel", "FRAGMENT")
HASH.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")


def hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """A different hash from SGLang's, of the same kind: 32 bits from (seed, position, column)."""
    mixed = (seed.long() * 0x9E3779B1 + positions.long() * 0x85EBCA77).unsqueeze(-1) + columns.long() * 0xC2B2AE3D
    for multiplier in (0x2545F491, 0x27D4EB2F):
        mixed = ((mixed ^ (mixed >> 15)) * multiplier) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)).to(torch.uint32)


HASH.impl("murmur_hash32_cpu", hash32, "CPU")


def make_sampler(target: str | None) -> Sampler:
    """A sampler without its constructor's distributed state. `target`: --rl-on-policy-target, which needs a GPU."""
    sampler = Sampler.__new__(Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.rl_on_policy_target = target
    sampler.enable_deterministic = sampler.use_log_softmax_logprob = target is not None
    sampler.use_ascend_backend = False
    sampler.output_logprob_processor = OutputLogprobProcessor()
    return sampler


def make_info(min_ps: Tensor, **settings: Any) -> SamplingBatchInfo:
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
        **settings,
    )


def draw(
    forward: Any, logits: Tensor, info: SamplingBatchInfo, target: str | None = None
) -> tuple[Tensor, Tensor, Any]:
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    nothing: list[Any] = [None] * ROWS
    token_ids = forward(make_sampler(target), output, info, True, [0] * ROWS, nothing, torch.arange(ROWS))
    return token_ids.long(), output.next_token_logprobs, output.customized_info


def check_seeds(logits: Tensor, min_ps: Tensor, target: str | None) -> None:
    """Draws are reproducible; rows without min_p are as without the plugin; others follow the constrained policy."""
    token_ids, logprobs, info = draw(Sampler.forward, logits, make_info(min_ps), target)
    again = draw(Sampler.forward, logits, make_info(min_ps), target)
    assert torch.equal(token_ids, again[0])
    assert torch.equal(logprobs, again[1])

    stock_ids, stock_logprobs, _ = draw(Sampler.forward.__wrapped__, logits, make_info(torch.zeros(ROWS)))
    assert torch.equal(token_ids[1::2], stock_ids[1::2])
    torch.testing.assert_close(logprobs[1::2], stock_logprobs[1::2], atol=1e-6 if target else 0, rtol=0)
    assert not torch.equal(token_ids[::2], stock_ids[::2])

    scaled = logits.double() / torch.linspace(0.5, 1.5, ROWS).view(-1, 1)
    keep = scaled >= scaled.amax(-1, keepdim=True) + LOG_MIN_P
    exact = scaled - scaled.masked_fill(~keep, -torch.inf).logsumexp(-1, keepdim=True)
    rows = torch.arange(0, ROWS, 2)
    assert keep[rows, token_ids[rows]].all()
    torch.testing.assert_close(logprobs[rows].double(), exact[rows, token_ids[rows]], atol=1e-5, rtol=0)
    counts = [None if row % 2 else int(count) for row, count in enumerate(keep.sum(-1))]
    assert [info["kept_count"][row] for row in range(ROWS)] == counts


def check_batches_without_min_p(logits: Tensor) -> None:
    """Batches without min_p are as without the plugin, in bfloat16, as only there a difference would show."""
    info = make_info(torch.zeros(ROWS))
    token_ids, logprobs, _ = draw(Sampler.forward, logits, info, "fsdp")
    stock_ids, stock_logprobs, _ = draw(Sampler.forward.__wrapped__, logits, info, "fsdp")
    assert logprobs.dtype is torch.bfloat16
    assert torch.equal(token_ids, stock_ids)
    assert torch.equal(logprobs, stock_logprobs)


def check_custom_processors(logits: Tensor, min_ps: Tensor) -> None:
    """The kept set is taken after custom processors, which are applied once."""
    calls: list[int] = []

    def prefer_seven(selected: Tensor, params: list[Any]) -> Tensor:
        calls.append(len(selected))
        return selected + 50.0 * (torch.arange(VOCAB) == 7)

    rows = [0, 1, 2]
    info = make_info(
        min_ps,
        has_custom_logit_processor=True,
        custom_params=[None] * ROWS,
        custom_logit_processor={1: ProcessorEntry(prefer_seven, rows, torch.tensor(rows))},
    )
    token_ids, logprobs, found = draw(Sampler.forward, logits, info)
    assert calls == [len(rows)]
    assert token_ids[rows].tolist() == [7, 7, 7]
    assert (logprobs[[0, 2]] == 0).all()
    assert [found["kept_count"][row] for row in rows] == [1, None, 1]


def main() -> None:
    load_plugins()
    logits = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    min_ps = torch.zeros(ROWS)
    min_ps[::2] = torch.tensor(LOG_MIN_P).exp()
    check_seeds(logits, min_ps, target=None)
    check_seeds(logits, min_ps, target="fsdp")
    check_batches_without_min_p(logits)
    check_custom_processors(logits, min_ps)


if __name__ == "__main__":
    main()
