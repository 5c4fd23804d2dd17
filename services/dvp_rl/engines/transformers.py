"""The reference engine: any full-attention Hugging Face causal LM, in this process, on CPU or GPU.

Continuous batching at token granularity (worker.py) over a cache written in place (kv_cache.py). In deterministic mode
each job is its own batch and threads are fixed: on the CPU, results depend only on weights and job, bit for bit.
Otherwise logits vary by about 3e-7 with the rest of the batch, also under the same seed. With a fixed shape there is no
cache, and log-probs equal those of a trainer with the same shape, bit for bit (fixed_shape.py).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from dvp_rl.contract.errors import ConfigError, UnavailableError
from dvp_rl.contract.group import EngineFacts, Sample
from dvp_rl.contract.job import Job
from dvp_rl.contract.shape import Shape
from dvp_rl.contract.weights import WeightVersion

from .adapter import check_base, holds_adapter
from .commands import Cancel, Reply, Stop, Submission, Swap
from .compute_dtype import compute_in
from .context import check_full_attention, model_context, text_config
from .decoder import CachedDecoder, Decoder
from .fixed_shape import FixedDecoder
from .limits import check_fits
from .model_folder import DTYPES, load_model, read_weights
from .protocol import PromptTokens
from .threads import num_threads
from .tokenizer import Tokenizer, load_config, load_tokenizer
from .worker import Worker

log = logging.getLogger(__name__)

MIB = 2**20


class TransformersEngine:
    """See dvp_rl.engines.protocol.Engine and Preferring. The constructor reads only the folder's configuration.

    `max_batch`: number of samples decoded together; the cache grows up to that many rows of the longest one's length.
    `max_context`: lowers the model's own context. `threads`: PyTorch's intra-op threads, by default 1 in deterministic
    mode and with `fixed_shape`. In deterministic mode a swap waits for the job that has begun. `fixed_shape`: its
    length limits the context. `prefix_cache_mib`: memory for prompts and answers that later prompts continue; not used
    in deterministic mode, because a continued prompt's logits differ in the last bits.
    """

    def __init__(
        self,
        model: Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_batch: int = 256,
        max_context: int | None = None,
        deterministic: bool = False,
        threads: int | None = None,
        fixed_shape: Shape | None = None,
        fp32_head: bool = False,
        prefix_cache_mib: int = 0,
        version: str = "local:0:0",
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
        if max_batch < 1:
            raise ConfigError(f"max_batch {max_batch}: must be at least 1")
        if threads is not None and threads < 1:
            raise ConfigError(f"threads {threads}: must be at least 1, or unset for one per CPU")
        config = load_config(model)
        self.facts = EngineFacts(
            name="transformers", version=transformers.__version__, dtype=dtype, fp32_head=fp32_head
        )
        self.context_length = _context_length(model, config, max_context)
        if fixed_shape is not None:
            self.context_length = min(self.context_length, fixed_shape.length)
        self.vocab_size: int = text_config(config).vocab_size
        self.capacity = max_batch
        check_full_attention(config, self.context_length)
        self._folder = model
        self._device = usable_device(device)
        self.job_by_job = deterministic
        self._fixed_shape = fixed_shape
        self._prefix_bytes = 0 if deterministic else prefix_cache_mib * MIB
        self._threads = num_threads(threads, reproducible=deterministic or fixed_shape is not None)
        self._initial_version = version
        self._model: Any = None
        self._decoder: Decoder | None = None
        self._worker: Worker | None = None
        self._thread: threading.Thread | None = None
        self._loading = asyncio.Lock()

    @property
    def version(self) -> str:
        return self._worker.version if self._worker else self._initial_version

    @property
    def num_running(self) -> int:
        """Number of samples that hold a row of the batch."""
        return self._worker.num_running if self._worker else 0

    @property
    def prompt_tokens(self) -> PromptTokens:
        return self._decoder.prompt_tokens if self._decoder else PromptTokens()

    async def start(self) -> None:
        tokenizer, self._model, decoder = await asyncio.to_thread(self._load)
        self._decoder = decoder
        self._worker = Worker(
            self._model,
            decoder,
            tokenizer,
            version=self._initial_version,
            max_batch=self.capacity,
            context_length=self.context_length,
            deterministic=self.job_by_job,
            threads=self._threads,
        )
        self._thread = threading.Thread(target=self._worker.run, name="transformers-engine", daemon=True)
        self._thread.start()

    def _load(self) -> tuple[Tokenizer, Any, Decoder]:
        # PyTorch keeps one count per calling thread. This thread also reads later weights; the worker sets its own.
        torch.set_num_threads(self._threads)
        tokenizer = load_tokenizer(self._folder)
        dtype, context = DTYPES[self.facts.dtype], self.context_length
        model = load_model(self._folder, dtype=dtype, device=self._device, context_length=context)
        if self.facts.fp32_head and model.dtype != torch.float32:
            compute_in(model.get_output_embeddings(), torch.float32)
        shape = self._fixed_shape
        decoder = CachedDecoder(model, self._prefix_bytes) if shape is None else FixedDecoder(model, shape)
        return tokenizer, model, decoder

    async def generate(self, job: Job) -> tuple[Sample, ...]:
        return await self._generate(job, urgent=False)

    async def generate_first(self, job: Job) -> tuple[Sample, ...]:
        return await self._generate(job, urgent=True)

    async def _generate(self, job: Job, *, urgent: bool) -> tuple[Sample, ...]:
        worker = self._running()
        check_fits(job, context_length=self.context_length, vocab_size=self.vocab_size)
        submission = Submission(job, _reply(), urgent)
        worker.send(submission)
        try:
            return cast("tuple[Sample, ...]", await submission.reply.future)
        except asyncio.CancelledError:
            worker.send(Cancel(submission))
            raise

    async def load(self, folder: Path, version: str) -> None:
        worker = self._running()
        async with self._loading:
            if holds_adapter(folder):
                check_base(folder, WeightVersion.parse(self._initial_version).digest)
            weights = await asyncio.to_thread(read_weights, folder, self._model, self._folder)
            swap = Swap(weights, version, _reply())
            worker.send(swap)
            await swap.reply.future

    async def close(self) -> None:
        if self._worker and self._thread:
            self._worker.send(Stop())
            await asyncio.to_thread(self._thread.join)
            self._worker = self._thread = self._model = self._decoder = None

    def _running(self) -> Worker:
        if self._worker is None:
            raise UnavailableError("the engine is not running: start it first, and do not use it after close")
        return self._worker


def _reply() -> Reply:
    loop = asyncio.get_running_loop()
    return Reply(loop, loop.create_future())


def _context_length(folder: Path, config: Any, max_context: int | None) -> int:
    own = model_context(config)
    longest = max_context or own
    if longest is None:
        raise ConfigError(f"model folder {folder}: config.json names no max_position_embeddings; set max_context")
    if not 2 <= longest <= (own or longest):
        raise ConfigError(f"max_context {max_context}: must lie in 2 to {own}, the model's own context")
    return longest


def usable_device(name: str) -> torch.device:
    """Raises ConfigError if PyTorch cannot use the device of that name here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r}: cannot be used here: {str(error).splitlines()[0]}") from None
    return device
