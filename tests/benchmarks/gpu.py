"""Runs, part by part, what is worth running on a GPU: tests, benchmarks, the demo, the lab.

Each part is a process with a time limit; one that fails or overruns stops no other, and the exit code is 1 then.
FOLDER/PART.log holds what it printed and FOLDER/summary.json how each part ended, on which card and with which
versions. Benchmarks write their numbers to tests/benchmarks/results/gpu.

    python -m tests.benchmarks.gpu FOLDER [PART ...]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

GRACE_S = 20.0
"""Time to end, in seconds; the demo stops its processes one after another."""
LAST_LINES = 12
"""Of a part's log, printed if the part failed."""
PACKAGES = ("torch", "triton", "transformers", "sglang", "sglang-kernel", "liger-kernel", "cut-cross-entropy", "trl")
ASK = """
import json, sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    with suppress(PackageNotFoundError):
        found[name] = version(name)
print(json.dumps(found))
"""
METHOD = ("tests/unit/dvp", "tests/unit/trainer/test_step.py", "tests/unit/sglang_plugin", "tests/unit/lab")
ENGINES = ("engines/test_conformance.py", "trainer/test_zero_mismatch.py", "lab/test_sources.py")
# pytest-benchmark, where it is installed, refuses to run beside pytest-xdist.
PYTEST = (*("-p", "no:benchmark", "-n", "6", "--dist", "loadfile"), *("-q", "--durations", "5", "-m", "not long"))


class Part(NamedTuple):
    limit_s: float
    arguments: tuple[str, ...]
    """Arguments of the Python interpreter."""


def tests(limit_s: float, *arguments: str) -> Part:
    return Part(limit_s, ("-m", "pytest", *PYTEST, *arguments))


def lm_head(limit_s: float, *arguments: str) -> Part:
    return Part(limit_s, ("-m", "tests.benchmarks.lm_head", "--device", "cuda", "--tokens", "8192", *arguments))


def demo(limit_s: float, *arguments: str) -> Part:
    return Part(limit_s, ("-m", "deploy.demo", "--device", "cuda", *arguments))


def lab(limit_s: float, study: str, sequences: int, *engines: str) -> Part:
    chosen = (part for engine in engines for part in ("--engine", engine))
    where = ("--device", "cuda", "--out", "trainer/lab/results/gpu")
    return Part(limit_s, ("-m", "dvp_lab", study, *where, "--sequences", str(sequences), *chosen))


HALF = ("--dtype", "bfloat16", "--repeats", "10")
SINGLE = ("--dtype", "float32", "--repeats", "3")
LOW = ("transformers-bf16", "transformers-bf16-fp32-head", "transformers-fp8")
PARTS = {
    "method": tests(150, "-k", "cuda or gpu", *METHOD),
    "engines": tests(150, "-k", "cuda or gpu", *(f"tests/integration/{file}" for file in ENGINES)),
    "lm-head-bf16": lm_head(120, *HALF),
    "lm-head-bf16-wide": lm_head(120, *HALF, "--hidden", "4096"),
    "lm-head-fp32": lm_head(120, *SINGLE),
    "lm-head-fp32-wide": lm_head(180, *SINGLE, "--hidden", "4096"),
    "crossing-bf16": lm_head(60, *HALF, "--crossing"),
    "crossing-fp32": lm_head(90, *SINGLE, "--crossing"),
    "demo": demo(180),
    "demo-sglang": demo(240, "--engine", "sglang", "--out", "runs/sglang"),
    "zero-mismatch": demo(120, "--zero-mismatch", "--steps", "10", "--out", "runs/zero"),
    "training": Part(300, ("-m", "tests.benchmarks.training", "--device", "cuda", "--limit", "270")),
    "sglang": Part(600, ("-m", "tests.benchmarks.sglang_gpu")),
    "signature": lab(600, "signature", 128, "transformers-fp32", "gaussian", *LOW),
    "overlap": lab(300, "overlap", 64, *LOW),
}


def facts() -> dict[str, Any]:
    """The card and the versions of what computes on it."""
    return {"card": torch.cuda.get_device_name(), "python": platform.python_version()} | versions(sys.executable)


def versions(python: str | Path) -> dict[str, str]:
    """Versions of those of PACKAGES that this interpreter finds."""
    told = subprocess.run([python, "-c", ASK, *PACKAGES], check=True, capture_output=True, text=True).stdout
    found: dict[str, str] = json.loads(told)
    return found


def run(part: Part, log: Path) -> dict[str, Any]:
    start, command = time.monotonic(), [sys.executable, *part.arguments]
    with log.open("wb") as file:
        process = psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(part.limit_s)
            end = "ok" if code == 0 else f"exit code {code}"
        except psutil.TimeoutExpired:
            end = f"over {part.limit_s:g} s"
            stop(process)
    return {"end": end, "seconds": round(time.monotonic() - start, 1)}


def stop(process: psutil.Popen) -> None:
    """Ends the process and all below it, whatever their sessions, so that they take nothing from the next part."""
    below = process.children(recursive=True)
    process.terminate()
    _, left = psutil.wait_procs([process, *below], GRACE_S)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    given = parser.parse_args()
    if unknown := set(given.parts) - PARTS.keys():
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no CUDA device here")
    given.folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"facts": facts(), "parts": {}}
    for name in given.parts or PARTS:
        summary["parts"][name] = ended = run(PARTS[name], given.folder / f"{name}.log")
        print(f"{name:<20} {ended['seconds']:>6.1f} s  {ended['end']}", flush=True)
        (given.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if ended["end"] != "ok":
            print(*(given.folder / f"{name}.log").read_text(errors="replace").splitlines()[-LAST_LINES:], sep="\n")
    raise SystemExit(any(ended["end"] != "ok" for ended in summary["parts"].values()))


if __name__ == "__main__":
    main()
