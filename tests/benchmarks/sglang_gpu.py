"""SGLang with the plugin on a GPU: CUDA graphs and overlap scheduling on, bfloat16, a vocabulary of 151,936 tokens.

    MODE      log-probs of 256 samples of 128 tokens at rho = e^-13 compared with a forward pass of Transformers over
              the same tokens, in bfloat16 and in float32, and whether a prompt's samples change by a bit if others are
              generated beside it. Modes: SGLang's defaults; without CUDA graphs and overlap;
              --enable-deterministic-inference; --rl-on-policy-target
    pruned    constrained sampling by the plugin compared with stock min-p sampling, 256 samples at once, alternately
    swap      how long a weight swap from a folder interrupts 64 samples, compared with reading the same bytes

The model has random weights, 8 layers, hidden size 1,024. A part that fails is recorded with its error.

    python -m tests.benchmarks.sglang_gpu [--flags "..."]      further flags of sglang.launch_server
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import shlex
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dvp_rl.contract.sampling import Sampling
from dvp_rl.dvp.policy import Constrained, constrained_logprobs
from dvp_rl.engines.sglang_client import SglangClient
from dvp_rl.engines.sglang_server import Launch, default_python
from dvp_rl.engines.sglang_wire import request_body
from tests.benchmarks.gpu import facts
from tests.benchmarks.sglang import CONTEXT, NEW, N, compare, direct, jobs, serving, swap
from tests.kit.models import EOS_ID, make_model

RESULTS = Path(__file__).parent / "results" / "gpu" / "sglang_gpu.json"
GOAL = 0.98
JOBS = 32
KV_TOKENS = 2**16
"""Enough for the samples that are generated at once."""
MODES: dict[str, tuple[str, ...]] = {
    "default": (),
    "eager": ("--disable-cuda-graph", "--disable-overlap-schedule"),
    "deterministic": ("--enable-deterministic-inference",),
    "on_policy": ("--rl-on-policy-target", "fsdp"),
}
MODEL = {"vocab_size": 151_936, "hidden": 1024, "layers": 8, "heads": 16, "kv_heads": 8}
DTYPES = (torch.bfloat16, torch.float32)


def launch(*flags: str) -> Launch:
    return Launch(
        python=default_python(),
        dtype="bfloat16",
        device="cuda",
        max_batch=JOBS * N,
        extra_args=flags,
        # Several servers share the card.
        mem_fraction_static=0.6,
        max_total_tokens=KV_TOKENS,
        ready_timeout_s=240,
    )


async def draw(client: SglangClient, number: int) -> list[dict[str, Any]]:
    bodies = [
        request_body(job, [f"{number}-{job.job_id}-{i}" for i in range(N)], NEW, {EOS_ID})
        for job in jobs("b", "m", number)
    ]
    return [answer for answers in await asyncio.gather(*map(client.generate, bodies)) for answer in answers]


async def mismatch(client: SglangClient, folder: Path) -> dict[str, Any]:
    alone = await draw(client, 1)
    answers = await draw(client, JOBS)
    prompts = [job.prompt_ids.tolist() for job in jobs("b", "m", JOBS) for _ in range(N)]
    token_ids = torch.tensor([answer["output_ids"] for answer in answers])
    drawn = torch.tensor([[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers])
    mass = torch.tensor([answer["meta_info"]["kept_mass"] for answer in answers])
    count = torch.tensor([answer["meta_info"]["kept_count"] for answer in answers])
    ids = torch.cat((torch.tensor(prompts), token_ids), 1)
    return {
        "tokens": token_ids.numel(),
        "kept_count": float(count.double().mean()),
        "kept_mass": float(mass.double().mean()),
        "bits_change_in_company": any(map(operator.ne, bits(alone), bits(answers))),
        **{str(dtype).removeprefix("torch."): differences(folder, dtype, ids, drawn, mass, count) for dtype in DTYPES},
    }


def bits(answers: list[dict[str, Any]]) -> list[Any]:
    """Tokens and log-probs of each sample."""
    return [(answer["output_ids"], answer["meta_info"]["output_token_logprobs"]) for answer in answers]


def differences(
    folder: Path, dtype: torch.dtype, ids: Tensor, drawn: Tensor, mass: Tensor, count: Tensor
) -> dict[str, Any]:
    """log pi_train - log pi_infer and its like, over the tokens that both sides keep."""
    own = recompute(folder, dtype, ids)
    inside = own.inside
    gap = (own.logprobs - drawn)[inside].double()
    return {
        "outside": int((~inside).sum()),
        "largest": float(gap.abs().max()),
        "mean_abs": float(gap.abs().mean()),
        "equal": float((gap == 0).double().mean()),
        "kl": float((gap.exp() - 1 - gap).mean()),
        "mass_mean_abs": float((own.kept_mass - mass).abs().mean()),
        "count_ratio": float((own.kept_count / count).double().mean()),
    }


@torch.inference_mode()
def recompute(folder: Path, dtype: torch.dtype, ids: Tensor) -> Constrained:
    """The trainer's side, in blocks of sequences."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda()
    parts = []
    for block in ids.cuda().split(16):
        logits = model(input_ids=block, logits_to_keep=NEW + 1).logits[:, :-1]
        rule = Sampling()
        parts.append(
            constrained_logprobs(logits, block[:, -NEW:], log_min_p=rule.log_min_p, temperature=rule.temperature)
        )
    return Constrained(*(torch.cat(part).cpu() for part in zip(*parts, strict=True)))


async def attempt(part: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    try:
        return await part
    except Exception as error:  # noqa: BLE001 - recorded, and the other parts go on
        return {"error": f"{type(error).__name__}: {error}"[-3000:]}


async def pruned(folder: Path, flags: tuple[str, ...], repeats: int) -> dict[str, Any]:
    """Nothing else is on the card."""
    async with (
        serving(folder, launch(*flags)) as ours,
        serving(folder, launch(*flags), plugin=False) as stock,
    ):
        speeds = await compare(repeats, JOBS, plugin=direct(ours, JOBS), stock=direct(stock, JOBS))
    return speeds | {"ratio": speeds["plugin"] / speeds["stock"]}


async def in_mode(mode: str, folder: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    async with serving(folder, launch(*flags, *MODES[mode])) as client:
        return await mismatch(client, folder)


async def run(flags: tuple[str, ...], repeats: int) -> None:
    results: dict[str, Any] = {"facts": facts(), "flags": flags, "goal": GOAL}

    async def tell(name: str, part: Awaitable[dict[str, Any]]) -> None:
        results[name] = await attempt(part)
        print(name, json.dumps(results[name]), flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as name:
        folders = [
            make_model(
                Path(name) / str(seed),
                seed=seed,
                context=CONTEXT,
                endless=True,
                spread=4.0,
                dtype=torch.bfloat16,
                **MODEL,
            )
            for seed in (0, 1)
        ]
        await tell("pruned", pruned(folders[0], flags, repeats))
        await asyncio.gather(*(tell(mode, in_mode(mode, folders[0], flags)) for mode in MODES))
        await tell("swap", swap(folders, repeats, launch(*flags)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flags", default="", help="further flags of sglang.launch_server")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    flags = tuple(shlex.split(given.flags))
    asyncio.run(run(flags, given.repeats))


if __name__ == "__main__":
    main()
