"""Engines that sample, with both sides' logits at every position.

Shapes: N sequences, P prompt tokens, T model tokens, V tokens in the vocabulary. Temperature is 1.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines.compute_dtype import compute_in
from dvp_rl.engines.model_folder import load_model
from dvp_rl.engines.server import LocalServer
from dvp_rl.engines.sglang_server import Launch, default_python
from dvp_rl.engines.tokenizer import load_config, load_tokenizer
from dvp_trainer.config import ModelSection
from dvp_trainer.learn.model import load_model as trainer_model

from .decoding import decode, new_cache
from .engines import Engine
from .precision import Format, multiply_in_fp8, round_weights
from .rules import Rule

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

CPU = torch.device("cpu")
SERVED_CONTEXT = 1024
NOISE = 0.1
"""s of the Gaussian control, in nats."""


class Samples(NamedTuple):
    """An engine's samples, in host memory. Entries off the mask are meaningless."""

    token_ids: Int[Tensor, "N T"]
    mask: Bool[Tensor, "N T"]
    """False after the first end token."""
    logprobs: Float[Tensor, "N T"]
    """log pi_infer of each token, under the rule it was drawn with."""
    logits: Float[Tensor, "N T V"] | None
    """Logits up to a constant per position; None if the engine returns none (SGLang under a rule that prunes)."""


class Source(Protocol):
    """An engine that has loaded a model."""

    name: str

    def close(self) -> None: ...

    def sample(self, prompts: Int[Tensor, "N P"], rule: Rule, num_tokens: int, seed: int) -> Samples: ...


class Trainer:
    """pi_train: the trainer's own model, one full forward pass in float32."""

    def __init__(self, folder: Path, device: torch.device = CPU) -> None:
        self._model = trainer_model(ModelSection(path=folder, device=str(device)))

    @torch.inference_mode()
    def logits(self, prompts: Int[Tensor, "N P"], token_ids: Int[Tensor, "N T"]) -> Float[Tensor, "N T V"]:
        ids, T = torch.cat((prompts, token_ids), 1).to(self._model.device), token_ids.shape[1]
        logits: Tensor = self._model(input_ids=ids, use_cache=False, logits_to_keep=T + 1).logits[:, :-1]
        return logits.cpu()


class Transformers:
    """The transformers engine's model, attention and sampler, token by token over a KV cache; rows in lockstep.

    `weights` and `kv` are the formats that these are rounded to; `fp8_products` requires bfloat16. `noise` is the s of
    fresh N(0, s^2) on every logit: the control, whose effect is known.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        *,
        device: torch.device = CPU,
        fp32_head: bool = False,
        fp8_products: bool = False,
        weights: Format | None = None,
        kv: Format | None = None,
        noise: float = 0.0,
    ) -> None:
        self.name, self._noise = name, noise
        self._model = load_model(folder, dtype=dtype, device=device)
        self._eos_ids = torch.tensor(sorted(load_tokenizer(folder).eos_ids))
        self._kv = kv
        if fp32_head:
            compute_in(self._model.get_output_embeddings(), torch.float32)
        if weights is not None:
            round_weights(self._model, weights)
        if fp8_products:
            multiply_in_fp8(self._model)

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    @torch.inference_mode()
    def sample(self, prompts: Int[Tensor, "N P"], rule: Rule, num_tokens: int, seed: int) -> Samples:
        random, device = torch.Generator().manual_seed(seed), self._model.device
        uniforms = torch.rand(len(prompts), num_tokens, dtype=torch.float64, generator=random)
        cache = new_cache(self._kv)

        def next_logits(ids: Tensor) -> Tensor:
            z = self._step(ids, cache)
            return z + self._noise * torch.randn(z.shape, generator=random).to(device)

        drawn, logits = decode(next_logits, prompts.to(device), rule, uniforms.to(device).unbind(1))
        token_ids = drawn.token_ids.cpu()
        return Samples(token_ids, until_end(token_ids, self._eos_ids), drawn.logprobs.cpu(), logits.cpu())

    def _step(self, ids: Tensor, cache: DynamicCache) -> Float[Tensor, "N V"]:
        start = cache.get_seq_length()
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape)
        out = self._model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        logits: Tensor = out.logits[:, -1].float()
        return logits


class Sglang:
    """A real SGLang server that runs until `close`. Unpruned, it returns the log-probs of the whole vocabulary."""

    def __init__(self, name: str, folder: Path, dtype: str, *flags: str) -> None:
        self.name = name
        self._eos_ids = sorted(load_tokenizer(folder).eos_ids)
        config = load_config(folder)
        self._vocab_size: int = config.vocab_size
        context = min(SERVED_CONTEXT, config.max_position_embeddings)
        launch = Launch(default_python(), dtype=dtype, threads=1, extra_args=flags)
        self._server = LocalServer(launch, context)
        self._runner = asyncio.Runner()
        self._runner.run(self._server.start(folder, name))

    def close(self) -> None:
        """Stops the server."""
        self._runner.run(self._server.stop())
        self._runner.run(self._server.client.close())
        self._runner.close()

    def sample(self, prompts: Int[Tensor, "N P"], rule: Rule, num_tokens: int, seed: int) -> Samples:
        if rule.slope:
            raise ConfigError(f"{self.name}: SGLang has one min-p per request and cannot prune by entropy")
        answers = self._runner.run(self._server.client.generate(self._request(prompts, rule, num_tokens, seed)))
        return self._read(answers, rule, num_tokens)

    def _request(self, prompts: Tensor, rule: Rule, num_tokens: int, seed: int) -> dict[str, Any]:
        setting = {
            "max_new_tokens": num_tokens,
            "temperature": 1.0,
            "min_p": math.exp(rule.log_min_p),
            "stop_token_ids": self._eos_ids,
        }
        everything = {"token_ids_logprob": list(range(self._vocab_size))} if not rule.prunes else {}
        return {
            "input_ids": prompts.tolist(),
            "sampling_params": [setting | {"sampling_seed": seed * len(prompts) + i} for i in range(len(prompts))],
            "return_logprob": True,
            **everything,
        }

    def _read(self, answers: list[dict[str, Any]], rule: Rule, T: int) -> Samples:
        N = len(answers)
        token_ids, mask = torch.zeros(N, T, dtype=torch.long), torch.zeros(N, T, dtype=torch.bool)
        logprobs = torch.zeros(N, T)
        logits = None if rule.prunes else torch.zeros(N, T, self._vocab_size)
        for row, answer in enumerate(answers):
            info = answer["meta_info"]
            drawn = info["output_token_logprobs"]
            t = len(drawn)
            mask[row, :t] = True
            logprobs[row, :t] = torch.tensor([logprob for logprob, _, _ in drawn])
            token_ids[row, :t] = torch.tensor([token_id for _, token_id, _ in drawn])
            if logits is not None:
                found = [[entry[0] for entry in position] for position in info["output_token_ids_logprobs"]]
                logits[row, :t] = torch.from_numpy(np.array(found, np.float32))
        return Samples(token_ids, mask, logprobs, logits)


class Trace(NamedTuple):
    """Sampled sequences with the logits of both sides."""

    samples: Samples
    train_logits: Float[Tensor, "N T V"]


def traces(
    source: Source, trainer: Trainer, prompts: Sequence[Int[Tensor, "N P"]], rule: Rule, num_tokens: int, seed: int
) -> Iterator[Trace]:
    """One trace per block of prompts; each block has its own seed. Raises ConfigError if a logit is not finite."""
    for number, block in enumerate(prompts):
        samples = source.sample(block, rule, num_tokens, seed + number)
        trace = Trace(samples, trainer.logits(block, samples.token_ids))
        for side, logits in ((source.name, samples.logits), ("the trainer", trace.train_logits)):
            if logits is not None and not logits.isfinite().all(-1)[samples.mask].all():
                raise ConfigError(
                    f"{side}: some logits are not finite, so that nothing can be said about their mismatch"
                )
        yield trace


def until_end(token_ids: Int[Tensor, "N T"], eos_ids: Int[Tensor, " E"]) -> Bool[Tensor, "N T"]:
    """True up to and including the first end token."""
    ended = torch.isin(token_ids, eos_ids)
    return ended.cumsum(1) - ended.long() == 0


# --- engines by name --------------------------------------------------------------------------------------------------


@contextmanager
def opened(engine: Engine, folder: Path, device: torch.device = CPU) -> Iterator[Source]:
    """Opens the engine with the folder's model and closes it afterwards. SGLang always runs on the CPU."""
    source = _open(engine, folder, device)
    try:
        yield source
    finally:
        source.close()


def _open(engine: Engine, folder: Path, device: torch.device) -> Source:
    match engine:
        case Engine.FP32:
            return Transformers(engine, folder, device=device)
        case Engine.BF16:
            return Transformers(engine, folder, torch.bfloat16, device=device)
        case Engine.BF16_FP32_HEAD:
            return Transformers(engine, folder, torch.bfloat16, device=device, fp32_head=True)
        case Engine.FP8:
            return Transformers(engine, folder, torch.bfloat16, device=device, fp8_products=True)
        case Engine.FP8_WEIGHTS:
            return Transformers(engine, folder, device=device, weights=Format.FP8)
        case Engine.FP8_KV:
            return Transformers(engine, folder, device=device, kv=Format.FP8)
        case Engine.GAUSSIAN:
            return Transformers(engine, folder, device=device, noise=NOISE)
        case Engine.SGLANG_FP32:
            return Sglang(engine, folder, "float32")
        case Engine.SGLANG_BF16_KV:
            return Sglang(engine, folder, "float32", "--kv-cache-dtype", "bfloat16")
        case Engine.SGLANG_BF16:
            return Sglang(engine, folder, "bfloat16")


def device_setting(device: torch.device) -> dict[str, object]:
    """What a study's settings say of a device other than the CPU."""
    if device.type == "cpu":
        return {}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"trainer and transformers engines": f"on {name}, PyTorch {torch.__version__}"}
