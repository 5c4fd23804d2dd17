"""1, 2 and 4 ranks (FSDP2 over gloo) on the same batches: memory of each rank, and equality of the updates.

    python -m tests.benchmarks.ranks [--small]

`state` is what a rank holds of parameters and optimizer, `peak` its peak resident memory, PyTorch itself included.
`moved` is the mean change of a weight over all steps, `apart` the mean and the largest difference from the weights that
one rank made of the same batches. AdamW divides by the root of a second moment, so that rounding in a gradient near
zero can move a single weight by a whole step (lr); the mean shows whether the update is the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.integration.trainer.ranked import LR, STEPS
from tests.integration.trainer.test_ranks import SIZES, train, weights_of
from tests.kit.models import make_model

RESULTS = Path(__file__).parent / "results" / "ranks.json"
MODEL = {"hidden": 512, "layers": 4, "vocab_size": 16_384}
SMALL = {"hidden": 64, "layers": 3, "vocab_size": 96}
TOLERANCE = 0.02
"""Largest `apart_mean`, as a share of `moved`."""


def flatten(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def measure(model: Path, root: Path) -> list[dict[str, Any]]:
    start, alone, results = flatten(load_file(model / "model.safetensors")), None, []
    for size in SIZES:
        out = train(root / str(size), model, size)
        weights = flatten(weights_of(out))
        alone = weights if alone is None else alone
        apart = (weights - alone).abs()
        results.append(
            {
                "ranks": size,
                "state_mib": [int((out / f"bytes-{rank}").read_text()) / 2**20 for rank in range(size)],
                "peak_mib": [int((out / f"peak-{rank}").read_text()) / 2**20 for rank in range(size)],
                "moved": float((weights - start).abs().mean()),
                "apart_mean": float(apart.mean()),
                "apart_max": float(apart.max()),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, and nothing written")
    small = parser.parse_args().small
    shape = SMALL if small else MODEL
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model", spread=2.0, tied=True, **shape)  # type: ignore[arg-type]
        results = measure(model, Path(name))
    print(f"{STEPS} steps at lr {LR:g}; MiB of the largest rank")
    print(f"{'ranks':>5} {'state':>8} {'of one':>7} {'peak':>8} {'moved':>9} {'apart':>9} {'at most':>9}")
    one = max(results[0]["state_mib"])
    for result in results:
        state, peak = max(result["state_mib"]), max(result["peak_mib"])
        print(
            f"{result['ranks']:>5} {state:>8.1f} {state / one:>7.2f} {peak:>8.1f} "
            f"{result['moved']:>9.2e} {result['apart_mean']:>9.2e} {result['apart_max']:>9.2e}"
        )
        assert result["apart_mean"] <= TOLERANCE * result["moved"], "not the same update"
    if not small:
        RESULTS.write_text(json.dumps({"model": MODEL, "lr": LR, "steps": STEPS, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
