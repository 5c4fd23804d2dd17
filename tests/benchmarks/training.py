"""Tokens per second and peak memory of one optimizer step of our trainer and of TRL's GRPOTrainer on the same batch.

packed, padded    our Learner.step with the two layouts, as `dvp-train` calls it, metrics included
... checkpointed  the same with gradient checkpointing
packed, sharded   parameters sharded over one rank (FSDP2), which shows what sharding costs, not what it saves
trl               GRPOTrainer.train without generation: from a batch on the device to the end of its optimizer step
trl checkpointed  the same with gradient checkpointing, which is TRL's default
trl liger         with Liger's layer kernels (`use_liger_kernel`), on a GPU, if liger-kernel is installed

All sides start from the same folder, a Qwen3 with random weights, keep float32 weights and AdamW states, and compute
in bfloat16: TRL by autocast. Ours computes the LM head with `head_logprobs`, TRL with its own fused head, which also
gives the entropy. Other settings are each side's defaults, such as AdamW's form. TRL shuffles and pads its rows.

Every completion token is one of TEXT tokens, whose logits are 40 nats above all others', so that exactly these tokens
are kept: none is vetoed. Weights are 1 (mode `unit`). TRL's ratio is 1, too, without a pass for old log-probs. Tokens
are those of prompts and completions without padding; a prompt counts for every sample, although packing reads it once.

Each side is a process. All import first; then they run one after another, each alone. Times are medians. Memory is the
peak of PyTorch's CUDA allocator after the warm-up; on a CPU, that of the whole process.

    python -m tests.benchmarks.training [--quick] [--device cuda] [--size 0.6b] [--micro-tokens N] [--micro-rows N]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from tests.kit.models import EOS_ID, PAD_ID, make_tokenizer

REPOSITORY = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "gpu" / "training.json"
TRL_PYTHON = REPOSITORY / ".trl/bin/python"
MARGIN = 40.0
"""Nats by which the logits of text tokens exceed the others."""


@dataclass(frozen=True)
class Size:
    hidden: int
    intermediate: int
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151_936
    text: int = 512
    """Number of tokens that occur."""

    @property
    def text_ids(self) -> np.ndarray:
        return np.linspace(5, self.vocab - 1, self.text).astype(np.int64)


@dataclass(frozen=True)
class Load:
    """The batch."""

    prompts: int = 16
    n: int = 8
    prompt: int = 256
    shortest: int = 64
    longest: int = 1024
    micro_tokens: int = 16_384
    """Ours: model.micro_batch_tokens."""
    micro_rows: int = 16
    """TRL: per_device_train_batch_size; must divide the number of samples."""


SIZES = {"0.6b": Size(1024, 3072), "1.7b": Size(2048, 6144), "tiny": Size(64, 192, 2, 4, 2, 16, vocab=8192, text=64)}
TINY = Load(prompts=4, n=4, prompt=32, shortest=16, longest=64, micro_tokens=512, micro_rows=4)
SIDES: dict[str, dict[str, Any]] = {
    "packed": {},
    "trl": {"trl": True},
    "packed, checkpointed": {"checkpointed": True},
    "trl checkpointed": {"trl": True, "checkpointed": True},
    "trl liger": {"trl": True, "liger": True},
    "padded": {"padded": True},
    "packed, sharded": {"sharded": True},
}


def make_model(size: Size, device: str, folder: Path) -> int:
    """Writes the model in bfloat16 and returns its number of parameters."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    )
    text = torch.from_numpy(size.text_ids).to(device)
    with torch.device(device), torch.no_grad():
        model = transformers.Qwen3ForCausalLM(config)
        # As in tests.kit.models: dimension 0 of the residual stream is constant; only text tokens look at it.
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        embeddings = model.get_input_embeddings().weight.normal_(0, size.hidden**-0.5)
        embeddings[:, 0] = 0
        embeddings[text, 0] = 1
        states = model.model(text[None, :64], use_cache=False).last_hidden_state
        model.model.norm.weight[0] *= MARGIN / states[..., 0].mean()
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    parameters = int(model.num_parameters())
    del model, layer, embeddings, states
    torch.cuda.empty_cache()  # the sides need the memory
    return parameters


def make_batch(size: Size, load: Load, file: Path) -> int:
    """Writes prompts [groups][tokens], samples [groups][n][tokens] and rewards [groups][n]; returns the tokens."""
    rng = np.random.default_rng(0)
    shape = load.prompts, load.n
    lengths = rng.integers(load.shortest, load.longest + 1, shape)
    batch = {
        "prompts": [rng.choice(size.text_ids, load.prompt).tolist() for _ in lengths],
        "samples": [[rng.choice(size.text_ids, t).tolist() for t in row] for row in lengths],
        "rewards": rng.random(shape).tolist(),
    }
    file.write_text(json.dumps(batch))
    return int(lengths.sum()) + lengths.size * load.prompt


class Side:
    """A process that has imported everything once `ready` returns, and measures when it is told to."""

    def __init__(self, python: str | Path, task: dict[str, Any], errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", "tests.benchmarks.training_sides", json.dumps(task)],
                cwd=REPOSITORY,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert self._process.stdout is not None
        self._out = self._process.stdout

    def ready(self) -> None:
        self._out.readline()

    def run(self, timeout_s: float) -> dict[str, Any]:
        """What the side measured, or why it did not."""
        try:
            out, _ = self._process.communicate("go\n" if timeout_s > 0 else None, timeout=max(timeout_s, 0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return {"error": "no time left"}
        if self._process.returncode == 0:
            found: dict[str, Any] = json.loads(out.splitlines()[-1])
            return found
        told = self._errors.read_text()
        sys.stderr.write(told[-4000:])
        return {"error": (told.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]}


def run(size: Size, load: Load, given: argparse.Namespace) -> dict[str, Any]:
    end = time.monotonic() + given.limit
    with tempfile.TemporaryDirectory() as folder:
        model, batch = Path(folder) / "model", Path(folder) / "batch.json"
        task = asdict(load) | {"model": str(model), "batch": str(batch), "device": given.device, "text": size.text}
        task |= {"warm_up": given.warm_up, "repeats": given.repeats}
        pythons = {True: given.trl_python, False: sys.executable}
        sides = {
            name: Side(pythons["trl" in SIDES[name]], task | SIDES[name], Path(folder) / f"{name}.txt")
            for name in given.sides
        }
        parameters, tokens = make_model(size, given.device, model), make_batch(size, load, batch)
        for side in sides.values():
            side.ready()
        print(f"{parameters / 1e6:.0f} M parameters, {tokens} tokens, {load}, {given.device}")
        print(f"{'':<22} {'tokens/s':>9} {'MiB':>8}")
        found = {}
        for name, side in sides.items():
            result = side.run(end - time.monotonic())
            if "error" in result:
                print(f"{name:<22} {result['error']}", flush=True)
                continue
            found[name] = result
            result["tokens_per_s"] = tokens / median(result["step_s"])
            print(f"{name:<22} {result['tokens_per_s']:>9.0f} {result['peak_mib']:>8.0f}", flush=True)
    cuda = given.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability(),
        "parameters": parameters,
        "tokens": tokens,
        "size": asdict(size),
        "load": asdict(load),
        "sides": found,
        "ratios": ratios(found),
    }


def ratios(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Speed and memory of each of our sides as a multiple of each of TRL's."""
    return [
        {
            "ours": ours,
            "trl": trl,
            "speed": round(found[ours]["tokens_per_s"] / found[trl]["tokens_per_s"], 3),
            "memory": round(found[ours]["peak_mib"] / found[trl]["peak_mib"], 3),
        }
        for ours in found
        for trl in found
        if "trl" not in SIDES[ours] and "trl" in SIDES[trl]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="only these")
    for option in ("prompts", "micro_tokens", "micro_rows"):
        parser.add_argument(f"--{option.replace('_', '-')}", type=int, help="of the batch, see Load")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before the timed ones")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps")
    parser.add_argument("--limit", type=float, default=90, help="seconds for all; sides without time left are left out")
    parser.add_argument("--trl-python", default=TRL_PYTHON if TRL_PYTHON.exists() else sys.executable)
    parser.add_argument("--out", type=Path, help="JSON to write; on a GPU without --quick it is written anyway")
    given = parser.parse_args()
    size, load = (SIZES["tiny"], TINY) if given.quick else (SIZES[given.size], Load())
    load = replace(load, **{name: value for name in asdict(load) if (value := getattr(given, name, None)) is not None})
    if load.prompts * load.n % load.micro_rows:
        parser.error(f"--micro-rows {load.micro_rows} does not divide {load.prompts * load.n} samples")
    results = run(size, load, given)
    for ratio in results["ratios"]:
        print(f"{ratio['ours']:<22} / {ratio['trl']:<17} speed {ratio['speed']:.2f}, memory {ratio['memory']:.2f}")
    out = given.out or (RESULTS if given.device == "cuda" and not given.quick else None)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=2) + "\n")
    if missing := [side for side in given.sides if side not in results["sides"]]:
        raise SystemExit(f"not measured: {'; '.join(missing)}")


if __name__ == "__main__":
    main()
