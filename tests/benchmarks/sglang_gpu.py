"""SGLang with the plugin on a GPU: CUDA graphs and overlap scheduling on, bfloat16, a vocabulary of 151,936 tokens.

    pruned    constrained sampling by the plugin compared with stock min-p sampling, 256 samples at once, alternately
    MODE      log-probs of 256 samples of 128 tokens at rho = e^-13 compared with a forward pass of Transformers over
              the same tokens, in bfloat16, in bfloat16 with the LM head in float32 and in float32, and whether a
              prompt's samples change by a bit if others are generated beside it. Modes: SGLang as --flags leave it;
              without CUDA graphs and overlap; --enable-deterministic-inference; --rl-on-policy-target; the first and
              the last with the LM head in float32
    swap      how long a weight swap from a folder interrupts 64 samples, compared with reading the same bytes

The model has random weights, 8 layers, hidden size 1,024. Each part's result has a file of its own, which stays as it
is if the part fails; the exit code is 1 then.

    python -m tests.benchmarks.sglang_gpu [PART ...] [--flags "..."]      further flags of sglang.launch_server
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import shlex
import tempfile
import traceback
from collections.abc import Awaitable
from contextlib import AsyncExitStack
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
from tests.benchmarks.gpu import facts, versions
from tests.benchmarks.sglang import CONTEXT, NEW, N, Stock, compare, direct, jobs, serving, swap
from tests.kit.models import EOS_ID, make_model

RESULTS = Path(__file__).parent / "results" / "gpu"
GOAL = 0.98
JOBS = 32
KV_TOKENS = 2**16
"""Enough for the samples that are generated at once."""
MODES: dict[str, tuple[str, ...]] = {
    "default": (),
    "eager": ("--disable-cuda-graph", "--disable-overlap-schedule"),
    "deterministic": ("--enable-deterministic-inference",),
    "on_policy": ("--rl-on-policy-target", "fsdp"),
    "fp32_head": ("--enable-fp32-lm-head",),
    "on_policy_fp32_head": ("--rl-on-policy-target", "fsdp", "--enable-fp32-lm-head"),
}
PARTS = ("pruned", *MODES, "swap")
MODEL = {"vocab_size": 151_936, "hidden": 1024, "layers": 8, "heads": 16, "kv_heads": 8}
SIDES = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16, float32 head": (torch.bfloat16, torch.float32),
    "float32": (torch.float32, torch.float32),
}
"""Dtypes of the trainer's layers and LM head."""


def launch(*flags: str, kind: type[Launch] = Launch) -> Launch:
    return kind(
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
        **{side: differences(recompute(folder, *dtypes, ids), drawn, mass, count) for side, dtypes in SIDES.items()},
    }


def bits(answers: list[dict[str, Any]]) -> list[Any]:
    """Tokens and log-probs of each sample."""
    return [(answer["output_ids"], answer["meta_info"]["output_token_logprobs"]) for answer in answers]


def differences(own: Constrained, drawn: Tensor, mass: Tensor, count: Tensor) -> dict[str, Any]:
    """log pi_train - log pi_infer and its like, over the tokens that both sides keep."""
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
def recompute(folder: Path, dtype: torch.dtype, head_dtype: torch.dtype, ids: Tensor) -> Constrained:
    """The trainer's side, in blocks of sequences."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda()
    head = model.get_output_embeddings().weight.to(head_dtype)
    parts = []
    for block in ids.cuda().split(16):
        states = model.model(input_ids=block, use_cache=False).last_hidden_state[:, -NEW - 1 : -1]
        logits = states.to(head_dtype) @ head.T
        rule = Sampling()
        parts.append(
            constrained_logprobs(logits, block[:, -NEW:], log_min_p=rule.log_min_p, temperature=rule.temperature)
        )
    return Constrained(*(torch.cat(part).cpu() for part in zip(*parts, strict=True)))


async def pruned(folder: Path, flags: tuple[str, ...], repeats: int) -> dict[str, Any]:
    """Nothing else is on the card."""
    async with AsyncExitStack() as running:
        async with asyncio.TaskGroup() as starting:
            ours, stock = (
                starting.create_task(running.enter_async_context(serving(folder, launch(*flags, kind=kind))))
                for kind in (Launch, Stock)
            )
        for client, has_plugin in ((ours.result(), True), (stock.result(), False)):
            answer, *_ = await draw(client, 1)
            assert ("kept_count" in answer["meta_info"]) is has_plugin, f"plugin wanted: {has_plugin}"
        speeds = await compare(repeats, JOBS, plugin=direct(ours.result(), JOBS), stock=direct(stock.result(), JOBS))
    return speeds | {"ratio": speeds["plugin"] / speeds["stock"], "goal": GOAL}


async def in_mode(mode: str, folder: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    async with serving(folder, launch(*flags, *MODES[mode])) as client:
        return await mismatch(client, folder)


async def run(parts: list[str], flags: tuple[str, ...], repeats: int) -> list[str]:
    """The parts that failed."""
    about, failed = facts() | {"engine": versions(default_python()), "flags": shlex.join(flags)}, []

    async def tell(name: str, part: Awaitable[dict[str, Any]]) -> None:
        try:
            found = await part
        except Exception:  # noqa: BLE001 - shown, and the other parts go on
            traceback.print_exc()
            failed.append(name)
            return
        print(name, json.dumps(found), flush=True)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"sglang_gpu.{name}.json").write_text(json.dumps(about | found, indent=2) + "\n")

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
            for seed in range(2 if "swap" in parts else 1)
        ]
        if "pruned" in parts:
            await tell("pruned", pruned(folders[0], flags, repeats))
        modes = [mode for mode in MODES if mode in parts]
        await asyncio.gather(*(tell(mode, in_mode(mode, folders[0], flags)) for mode in modes))
        if "swap" in parts:
            await tell("swap", swap(folders, repeats, launch(*flags)))
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--flags", default="", help="further flags of sglang.launch_server")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    flags = tuple(shlex.split(given.flags))
    if failed := asyncio.run(run(given.parts or list(PARTS), flags, given.repeats)):
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
