"""SGLang with the plugin on a GPU: CUDA graphs and overlap scheduling on, bfloat16, a vocabulary of 151,936 tokens.

    kernel    the plugin's kernel compared with the same in PyTorch, for batches of logits in float32, alternately:
              milliseconds from call to call, and of the host to launch one; the shortest count
    pruned    constrained sampling by the plugin compared with stock min-p sampling, 256 samples at once, alternately:
              medians of tokens per second and of the ratio of neighbours, and the middle half of these ratios, because
              the host's speed may drift
    profile   16 decoding steps of 256 samples in PyTorch's profiler, with the plugin and without: milliseconds from
              step to step and on the GPU, in CUDA graphs and outside, where sampling is; kernels and copies; waits of
              the host; what takes longest outside. The profiler slows the host down, and waits once itself
    MODE      log-probs of 256 samples of 128 tokens at rho = e^-13 compared with a forward pass of Transformers over
              the same tokens, in bfloat16, in bfloat16 with the LM head in float32 and in float32, and whether a
              prompt's samples change by a bit if others are generated beside it. Modes: SGLang as --flags leave it;
              without CUDA graphs and overlap; --enable-deterministic-inference; --rl-on-policy-target; the first and
              the last with the LM head in float32
    swap      how long a weight swap from a folder interrupts 64 samples, compared with reading the same bytes
    transfer  seconds of a weight transfer over a process group, from request to resumed server: gloo from a CPU, NCCL
              from the last GPU. NCCL refuses two processes on one GPU; the entry then holds what both sides say

The model has random weights, 8 layers, hidden size 1,024. Each part's result has a file of its own, which stays as it
is if the part fails; the exit code is 1 then.

    python -m tests.benchmarks.sglang_gpu [PART ...] [--flags "..."]      further flags of sglang.launch_server
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import logging
import operator
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import cache, partial
from logging.handlers import BufferingHandler
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dvp_rl.contract.errors import DvpError
from dvp_rl.contract.sampling import Sampling
from dvp_rl.dvp.policy import Constrained, constrained_logprobs
from dvp_rl.dvp.pruning import prune, prune_in_blocks
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.sglang_client import SglangClient
from dvp_rl.engines.sglang_server import Launch, default_python
from dvp_rl.engines.sglang_wire import request_body
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.weights.transfers import Transfers
from tests.benchmarks.gpu import facts, versions
from tests.benchmarks.sglang import CONTEXT, MIN_P, NEW, SMALL, N, Stock, compare, direct, jobs, serving, size, swaps
from tests.integration.trainer.sending import sender
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
BATCHES, CALLS = (1, 16, 64, 256), 10
"""Rows of `kernel`, and calls in a row, each with logits of its own."""
PAIRS = 20
"""Comparisons of `pruned`."""
PARTS = ("kernel", "pruned", "profile", *MODES, "swap", "transfer")
WAIT_S, LIMIT_S = 60.0, 40.0
"""Longest time for an answer of the sender or a trace, and for a transfer, in seconds."""
STEPS, LONGEST, NAME = 16, 12, 100
"""Steps in a profile, kernels that it names, and characters of a name."""
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


@asynccontextmanager
async def both(folder: Path, flags: tuple[str, ...]) -> AsyncIterator[dict[str, SglangClient]]:
    """A server with the plugin and one without. Nothing else is on the card."""
    async with AsyncExitStack() as running:
        async with asyncio.TaskGroup() as starting:
            servers = {
                name: starting.create_task(running.enter_async_context(serving(folder, launch(*flags, kind=kind))))
                for name, kind in {"plugin": Launch, "stock": Stock}.items()
            }
        clients = {name: server.result() for name, server in servers.items()}
        for name, client in clients.items():
            answer, *_ = await draw(client, 1)
            assert ("kept_count" in answer["meta_info"]) is (name == "plugin"), f"{name} is not what it says"
        yield clients


def compare_pruning(repeats: int) -> dict[str, Any]:
    return {"batches": [compare_batch(batch, repeats) for batch in BATCHES]}


def compare_batch(batch: int, repeats: int) -> dict[str, Any]:
    logits = 4 * torch.randn(batch, MODEL["vocab_size"], device="cuda")
    settings = torch.full((batch,), MIN_P["min_p"], device="cuda"), torch.ones(batch, 1, device="cuda")
    times: dict[str, list[tuple[float, float]]] = {"kernel": [], "pytorch": []}
    for _ in range(1 + repeats):  # the first compiles
        times["kernel"].append(milliseconds(prune, logits, settings))
        times["pytorch"].append(milliseconds(prune_in_blocks, logits, settings))
    best = {name: [min(kind) for kind in zip(*each[1:], strict=True)] for name, each in times.items()}
    return {"rows": batch} | {
        kind: {"kernel": kernel, "pytorch": pytorch, "ratio": kernel / pytorch}
        for kind, kernel, pytorch in zip(("call_ms", "launch_ms"), best["kernel"], best["pytorch"], strict=True)
    }


@torch.no_grad()
def milliseconds(side: Callable[..., Tensor], logits: Tensor, settings: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """From call to call, and of the host alone. Each call prunes logits of its own."""
    copies = [logits.clone() for _ in range(CALLS)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    clock = time.perf_counter()
    start.record()
    for each in copies:
        side(each, *settings)
    end.record()
    host_s = time.perf_counter() - clock
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS, 1000 * host_s / CALLS


async def pruned(clients: dict[str, SglangClient]) -> dict[str, Any]:
    speeds = await compare(PAIRS, JOBS, **{name: direct(client, JOBS) for name, client in clients.items()})
    ratios = [plugin / stock for plugin, stock in zip(speeds["plugin"], speeds["stock"], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    medians = {name: median(each) for name, each in speeds.items()}
    return medians | {"ratio": middle, "middle half": [low, high], "goal": GOAL}


async def profile(clients: dict[str, SglangClient]) -> dict[str, Any]:
    found = {}
    for name, client in clients.items():
        await draw(client, JOBS)  # compiles what is compiled at first use
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(draw(client, JOBS))
            while await client.num_running() < JOBS * N:  # the server has no event for it
                assert not running.done(), "all samples ended before all of them ran"
                await asyncio.sleep(0.01)
            found[name] = summary(await traced(client))
    return found


async def traced(client: SglangClient) -> list[dict[str, Any]]:
    """The events of a trace of the next steps. Stacks, which SGLang adds unless told otherwise, take minutes."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"output_dir": folder, "num_steps": STEPS, "activities": ["CPU", "GPU"], "with_stack": False}
        await client._call("POST", "/start_profile", asked, admin=True)
        async with asyncio.timeout(WAIT_S):
            while True:
                with suppress(ValueError, EOFError):  # none yet, or not written to its end
                    return await asyncio.to_thread(read_trace, Path(folder))
                await asyncio.sleep(0.1)


def read_trace(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("*.trace.json.gz")
    events: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return events


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Times in milliseconds per step. What a CUDA graph runs has the correlation of the graph's launch."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        kinds.setdefault(event.get("cat", ""), []).append(event)
    calls = kinds["cuda_runtime"] + kinds.get("cuda_driver", [])
    launches = {call["args"]["correlation"] for call in calls if "GraphLaunch" in call["name"]}
    assert launches, "these flags leave no CUDA graphs"
    sides: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for event in (*kinds["kernel"], *kinds.get("gpu_memcpy", []), *kinds.get("gpu_memset", [])):
        sides[event["args"]["correlation"] in launches].append(event)
    every = [event for side in sides.values() for event in side]
    span = max(event["ts"] + event["dur"] for event in every) - min(event["ts"] for event in every)
    longest: dict[str, float] = {}
    for event in sides[False]:
        longest[event["name"][:NAME]] = longest.get(event["name"][:NAME], 0.0) + per_step(event["dur"], launches)
    return {
        "steps": len(launches),
        "step_ms": per_step(span, launches),
        "graph_ms": per_step(sum(event["dur"] for event in sides[True]), launches),
        "graph_kernels": len(sides[True]) / len(launches),
        "other_ms": per_step(sum(event["dur"] for event in sides[False]), launches),
        "other_kernels": len(sides[False]) / len(launches),
        "waits": sum("Synchronize" in call["name"] for call in calls) / len(launches),
        "longest": dict(sorted(longest.items(), key=operator.itemgetter(1), reverse=True)[:LONGEST]),
    }


def per_step(microseconds: float, launches: set[int]) -> float:
    return microseconds / 1000 / len(launches)


async def transfer(folders: list[Path], launch: Launch) -> dict[str, Any]:
    engine = SglangEngine(folders[0], launch, version="bench:0:aa", load_timeout_s=LIMIT_S)
    with tempfile.TemporaryDirectory() as scratch, EmbeddedBroker(Path(scratch)) as embedded:
        async with await Broker.connect(embedded.url, "bench") as broker:
            await engine.start()
            try:
                routes = {"gloo": "cpu", "nccl": f"cuda:{torch.cuda.device_count() - 1}"}
                found = {route: await by_route(engine, broker, folders, device) for route, device in routes.items()}
            finally:
                await engine.close()
    return {"bytes": float(size(folders[0])), "gpus": torch.cuda.device_count(), **found}


async def by_route(engine: SglangEngine, broker: Broker, folders: list[Path], device: str) -> dict[str, Any]:
    """Seconds of the second transfer, as the first one starts processes; or what both sides say of a failure."""
    heard = BufferingHandler(1000)
    heard.setLevel(logging.WARNING)
    logging.getLogger("dvp_trainer").addHandler(heard)
    try:
        return {"seconds": [await send(engine, broker, folder, device) for folder in folders][-1]}
    except DvpError as error:
        async with asyncio.timeout(WAIT_S):
            while not heard.buffer:  # noqa: ASYNC110 - the sender's process ends later
                await asyncio.sleep(0.1)
        return {"replica": str(error), "trainer": [record.getMessage() for record in heard.buffer]}
    finally:
        logging.getLogger("dvp_trainer").removeHandler(heard)


async def send(engine: SglangEngine, broker: Broker, folder: Path, device: str) -> float:
    """Seconds until the engine serves the folder's weights, sent from this device."""
    version = f"bench:{folder.name[-1]}:{device[:2]}"
    # Forked processes import the main module again. That of dvp-train is light, this one is not.
    with patch.multiple(sys.modules["__main__"], __spec__=None, __file__=None):
        async with sender(broker, version, folder, device=device, send_timeout_s=LIMIT_S):
            start = time.perf_counter()
            await engine.receive(await Transfers(broker).ask(engine.transfer_request(version), WAIT_S))
            return time.perf_counter() - start


async def in_mode(mode: str, folder: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    async with serving(folder, launch(*flags, *MODES[mode])) as client:
        return await mismatch(client, folder)


async def run(parts: list[str], flags: tuple[str, ...], repeats: int) -> list[str]:
    """The parts that failed."""
    about, failed = facts() | {"engine": versions(default_python()), "flags": shlex.join(flags)}, []

    @contextmanager
    def attempt(*names: str) -> Iterator[None]:
        """Shows what goes wrong, and the other parts go on."""
        try:
            yield
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            failed.extend(names)

    async def tell(name: str, part: Awaitable[dict[str, Any]]) -> None:
        with attempt(name):
            found = await part
            print(name, json.dumps(found), flush=True)
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"sglang_gpu.{name}.json").write_text(json.dumps(about | found, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as name:

        @cache
        def make(kind: str, seed: int, **shape: int) -> Path:
            folder, options = Path(name) / f"{kind}{seed}", {"context": CONTEXT, "endless": True, "spread": 4.0}
            return make_model(folder, seed=seed, dtype=torch.bfloat16, **options, **shape)

        large = partial(make, "large", **MODEL)
        if "kernel" in parts:
            await tell("kernel", asyncio.to_thread(compare_pruning, repeats))
        if compared := [part for part in ("pruned", "profile") if part in parts]:
            with attempt(*compared):
                async with both(large(0), flags) as clients:
                    for part in compared:
                        await tell(part, pruned(clients) if part == "pruned" else profile(clients))
        modes = [mode for mode in MODES if mode in parts]
        await asyncio.gather(*(tell(mode, in_mode(mode, large(0), flags)) for mode in modes))
        if "swap" in parts:
            small = [make("small", seed, **SMALL) for seed in range(2)]
            await tell("swap", swaps(small, [large(0), large(1)], repeats, launch(*flags)))
        if "transfer" in parts:
            await tell("transfer", transfer([large(0), large(1)], launch(*flags)))
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
