"""Time and memory of the LM head under the constrained policy, forward and backward, by kept share.

unfused   ours without its Triton kernels; on a GPU
plain     logits of all tokens at once, then the same constrained log-probs
chunked   the same in chunks of rows, logits computed again in the backward (torch.utils.checkpoint)
floor     only the three dense products: hidden W', G W, G' hidden
liger     Liger's fused kernel for the whole vocabulary's cross-entropy per token; on a GPU, if it is installed
cce       cut-cross-entropy's kernel, which skips small gradients; likewise, in half precision only

Times are medians of alternating repeats in one process, ratios medians of the ratios within a repeat. Memory is the
peak of PyTorch's allocator during the call, without the gradient of the weight.

    python -m tests.benchmarks.lm_head [--quick] [--dtype bfloat16] [--device cuda]
    python -m tests.benchmarks.lm_head --crossing       compares all rows sparse with all rows dense, for MAX_SHARE
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from dvp_rl.dvp.lm_head import head_logprobs, kernels_on
from dvp_rl.dvp.policy import constrained_logprobs

RESULTS = Path(__file__).parent / "results"
SHARES = (0.0001, 0.0004, 0.001, 0.01, 0.1, 0.5)
AROUND_CROSSING = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
GOALS = {"ours / floor where at most 0.1 % is kept": 0.6, "ours / chunked": 1.1, "memory, ours / plain": 1 / 8}
CHUNKS = {"cpu": 2**23, "cuda": 2**27}
"""Number of logits that `chunked` has in memory at a time: 32 MiB of float32 on a CPU, 512 MiB on a GPU."""


@dataclass(frozen=True)
class Size:
    tokens: int = 512
    hidden: int = 1024
    vocab: int = 151_936
    dtype: str = "float32"
    device: str = "cpu"


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    token_ids: Tensor
    log_min_p: Tensor
    """[tokens]: the threshold that keeps the wanted share of each row."""
    upstream: Tensor


def make_inputs(size: Size, share: float) -> Inputs:
    generator = torch.Generator(size.device).manual_seed(0)
    dtype = getattr(torch, size.dtype)
    hidden = torch.randn(size.tokens, size.hidden, generator=generator, device=size.device).to(dtype)
    weight = torch.empty(size.vocab, size.hidden, device=size.device)
    weight.normal_(0, 2 / size.hidden**0.5, generator=generator)
    keep = max(1, round(share * size.vocab))
    settings, token_ids = [], []
    for states in hidden.split(64):
        kept = (states @ weight.to(dtype).T).float().topk(keep)
        settings.append((kept.values[:, -1] - kept.values[:, 0]).double() - 1e-4)
        token_ids.append(kept.indices[:, keep // 2])
    return Inputs(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.cat(token_ids),
        torch.cat(settings).clamp(max=0.0),
        torch.randn(size.tokens, generator=generator, device=size.device),
    )


def ours(x: Inputs, max_share: float | None = None, *, kernels: bool = True) -> None:
    settings = {"log_min_p": x.log_min_p, "temperature": 1.0}
    own = head_logprobs(x.hidden, x.weight, None, x.token_ids, **settings, max_share=max_share, kernels=kernels)
    own.logprobs.backward(x.upstream)


def plain(x: Inputs) -> None:
    _logprobs(x.hidden, x.weight, x.token_ids, x.log_min_p).backward(x.upstream)


def chunked(x: Inputs) -> None:
    rows = max(1, CHUNKS[x.hidden.device.type] // len(x.weight))
    parts = zip(x.hidden.split(rows), x.token_ids.split(rows), x.log_min_p.split(rows), strict=True)
    logprobs = [checkpoint(_logprobs, h, x.weight, ids, limit, use_reentrant=False) for h, ids, limit in parts]
    torch.cat(logprobs).backward(x.upstream)


def floor(x: Inputs) -> None:
    with torch.no_grad():
        head = x.weight.to(x.hidden.dtype)
        gradient = x.hidden @ head.T
        x.hidden.grad = gradient @ head
        x.weight.grad = (gradient.T @ x.hidden).to(x.weight.dtype)


def liger(x: Inputs) -> None:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    head = x.weight.to(x.hidden.dtype)
    losses = LigerFusedLinearCrossEntropyFunction.apply(
        x.hidden, head, x.token_ids, None, None, -100, 0.0, 0.0, "none", None, False, torch.float32
    )[0]
    losses.backward(-x.upstream)


def cce(x: Inputs) -> None:
    from cut_cross_entropy import linear_cross_entropy

    head = x.weight.to(x.hidden.dtype)
    linear_cross_entropy(x.hidden, head, x.token_ids, reduction="none").backward(-x.upstream)


def _logprobs(hidden: Tensor, weight: Tensor, token_ids: Tensor, log_min_p: Tensor) -> Tensor:
    logits = hidden @ weight.to(hidden.dtype).T
    return constrained_logprobs(logits, token_ids, log_min_p=log_min_p, temperature=1.0).logprobs


Side = Callable[[Inputs], None]
SIDES: dict[str, Side] = {"ours": ours, "plain": plain, "chunked": chunked, "floor": floor}
FUSED: dict[str, Side] = {"unfused": partial(ours, kernels=False), "liger": liger, "cce": cce}
"""For GPUs."""
PACKAGES = {"unfused": "triton", "liger": "liger_kernel", "cce": "cut_cross_entropy"}
KINDS: dict[str, Side] = {"sparse": partial(ours, max_share=1.0), "dense": partial(ours, max_share=0.0)}


def sides_for(size: Size) -> dict[str, Side]:
    """SIDES, and those of FUSED that are installed and run on this device."""
    on_gpu = size.device != "cpu"
    if on_gpu and kernels_on(torch.device(size.device), getattr(torch, size.dtype)) is None:
        raise SystemExit("the kernels do not work here, as the log says, and `ours` would be `unfused`")
    fits = {"unfused": on_gpu, "liger": on_gpu, "cce": on_gpu and size.dtype != "float32"}
    return SIDES | {name: FUSED[name] for name, package in PACKAGES.items() if fits[name] and find_spec(package)}


def run_once(side: Side, inputs: Inputs) -> float:
    inputs.hidden.grad = inputs.weight.grad = None
    wait_for(inputs)
    start = time.perf_counter()
    side(inputs)
    wait_for(inputs)
    return time.perf_counter() - start


def wait_for(inputs: Inputs) -> None:
    if inputs.hidden.is_cuda:
        torch.cuda.synchronize()


def run_alternately(sides: dict[str, Side], inputs: Inputs, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat, by side, after a warm-up round."""
    rounds = [[run_once(side, inputs) for side in sides.values()] for _ in range(repeats + 1)]
    return dict(zip(sides, map(list, zip(*rounds[1:], strict=True)), strict=True))


def ratio(above: list[float], below: list[float]) -> float:
    return round(median(a / b for a, b in zip(above, below, strict=True)), 3)


def measure_memory(side: Side, inputs: Inputs) -> float:
    """Peak memory of PyTorch's allocator above its start, without the weight's gradient, in MiB."""
    inputs.hidden.grad = inputs.weight.grad = None
    if inputs.hidden.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run_once(side, inputs)
        return (torch.cuda.max_memory_allocated() - before - inputs.weight.nbytes) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run_once(side, inputs)
    changes = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = max(accumulate(e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns())))
    return (peak - inputs.weight.nbytes) / 2**20


def run_case(size: Size, share: float, repeats: int) -> dict[str, Any]:
    inputs, sides = make_inputs(size, share), sides_for(size)
    seconds = run_alternately(sides, inputs, repeats)
    memory = {name: measure_memory(side, inputs) for name, side in sides.items()}
    return {
        "share": share,
        "seconds": {side: round(median(values), 5) for side, values in seconds.items()},
        "memory_mib": {side: round(value, 1) for side, value in memory.items()},
        **{f"ours / {side}": ratio(seconds["ours"], seconds[side]) for side in sides if side != "ours"},
        "memory, ours / plain": round(memory["ours"] / memory["plain"], 3),
    }


def run_all(size: Size, shares: tuple[float, ...], repeats: int) -> list[dict[str, Any]]:
    sides = sides_for(size)
    print(f"{'kept':>7} " + " ".join(f"{side:>8}" for side in sides) + "   /floor /chunked  memory  /plain")
    results = []
    for share in shares:
        result = run_case(size, share, repeats)
        results.append(result)
        times = " ".join(f"{result['seconds'][side]:>8.4f}" for side in sides)
        print(
            f"{share:>7.2%} {times}   {result['ours / floor']:>6.2f} {result['ours / chunked']:>8.2f} "
            f"{result['memory_mib']['ours']:>7.1f} {result['memory, ours / plain']:>7.3f}",
            flush=True,
        )
    print("goals: " + ", ".join(f"{name} <= {goal:g}" for name, goal in GOALS.items()))
    return results


def find_crossing(size: Size, shares: tuple[float, ...], repeats: int) -> None:
    for share in shares:
        seconds = run_alternately(KINDS, make_inputs(size, share), repeats)
        found = ratio(seconds["sparse"], seconds["dense"])
        print(f"{share:>7.2%} kept: sparse / dense {found:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small vocabulary, and nothing written")
    parser.add_argument("--crossing", action="store_true", help="where sparse and dense cost the same; nothing written")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--share", type=float, help="one kept share instead of all; nothing written")
    for option, value in asdict(Size()).items():
        parser.add_argument(f"--{option}", type=type(value), default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    size = Size(**{name: getattr(arguments, name) for name in asdict(Size())})
    if arguments.quick:
        size = replace(size, tokens=128, hidden=128, vocab=8192)
    shares = SHARES if arguments.share is None else (arguments.share,)
    print(
        f"{size.tokens} tokens, hidden {size.hidden}, vocabulary {size.vocab}, {size.dtype}, {size.device}; "
        "seconds and MiB"
    )
    if arguments.crossing:
        find_crossing(size, AROUND_CROSSING if arguments.share is None else shares, arguments.repeats)
        return
    results = run_all(size, shares, arguments.repeats)
    if not arguments.quick and arguments.share is None:
        on = {"threads": torch.get_num_threads()} if size.device == "cpu" else {"card": torch.cuda.get_device_name()}
        facts = {"size": asdict(size), **on, "torch": torch.__version__, "goals": GOALS}
        name = "lm_head" if size == Size() else f"lm_head.{size.dtype}-{size.hidden}"
        folder = RESULTS if size.device == "cpu" else RESULTS / "gpu"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(facts | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
