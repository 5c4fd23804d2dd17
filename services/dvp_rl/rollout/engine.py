"""Builds the engine that the settings name, and imports only the libraries of that engine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from dvp_rl.contract.engine import EngineName
from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.shape import Shape
from dvp_rl.contract.weights import INITIAL_SEQ, WeightVersion
from dvp_rl.engines.protocol import Engine
from dvp_rl.extras import pip_install
from dvp_rl.hooks import call_hook, check_members, load_hook
from dvp_rl.weights.folder import folder_digest

from .prompts import Prompts
from .settings import RolloutSettings, ServerSettings

FAKE_CONTEXT = 4096
ENGINE_ATTRIBUTES = ("facts", "context_length", "vocab_size", "capacity", "job_by_job", "version", "num_running")
ENGINE_METHODS = ("start", "generate", "load", "close")
"""What `Engine` asks of an engine."""


def build(settings: RolloutSettings) -> tuple[Engine, Prompts]:
    """Slow: imports the engine's libraries and reads every byte of the model folder. Raises ConfigError."""
    try:
        from dvp_rl.engines.tokenizer import load_tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(f"a replica needs {error.name}: {pip_install('rollout')}") from None

    tokenizer = load_tokenizer(settings.model)
    version = WeightVersion(settings.run_id, INITIAL_SEQ, folder_digest(settings.model))
    engine = _engine(settings, str(version), tokenizer.vocab_size)
    return engine, Prompts(tokenizer, engine)


def _engine(settings: RolloutSettings, version: str, vocab_size: int) -> Engine:
    if settings.fixed_shape is not None and settings.engine is not EngineName.TRANSFORMERS:
        raise ConfigError(
            f"fixed_shape {settings.fixed_shape}: only engine = transformers computes in a fixed shape, not "
            f"{settings.engine}. The closest alternative on a GPU is SGLang with --deterministic and "
            "--sglang.extra-args='--rl-on-policy-target fsdp'"
        )
    if settings.engine is EngineName.FAKE:
        from dvp_rl.engines.fake import FakeEngine

        return FakeEngine(
            **settings.fake.model_dump(),
            capacity=settings.max_batch,
            context_length=settings.max_context or FAKE_CONTEXT,
            vocab_size=vocab_size,
            version=version,
        )
    if settings.engine is EngineName.TRANSFORMERS:
        try:
            from dvp_rl.engines.transformers import TransformersEngine
        except ModuleNotFoundError as error:
            raise ConfigError(f"engine 'transformers' needs {error.name}: {pip_install('torch')}") from None

        return TransformersEngine(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            max_batch=settings.max_batch,
            max_context=settings.max_context,
            deterministic=settings.deterministic,
            threads=settings.threads,
            fixed_shape=None if settings.fixed_shape is None else Shape.parse(settings.fixed_shape),
            fp32_head=settings.fp32_head,
            prefix_cache_mib=settings.prefix_cache_mib,
            version=version,
        )
    if settings.engine is EngineName.SGLANG:
        return _sglang(settings, version)
    if settings.engine is EngineName.VLLM:
        return _vllm(settings, version)
    return _own(settings, version)


def _own(settings: RolloutSettings, version: str) -> Engine:
    engine: Engine = call_hook("engine", load_hook("engine", settings.engine), settings, version=version)
    check_members("engine", engine, attributes=ENGINE_ATTRIBUTES, methods=ENGINE_METHODS)
    return engine


def _sglang(settings: RolloutSettings, version: str) -> Engine:
    from dvp_rl.engines.sglang import SglangEngine
    from dvp_rl.engines.sglang_server import Launch, Remote, default_python

    given = settings.sglang
    source: Launch | Remote
    if given.url is not None:
        source = Remote(admin_key=given.admin_key.get_secret_value(), **_reached(given.url, given))
    else:
        source = Launch(
            deterministic=settings.deterministic,
            fp32_head=settings.fp32_head,
            **given.model_dump(include={"dp", "mem_fraction_static", "max_total_tokens", "interface"}),
            **_launched(settings, given, default_python()),
        )
    return SglangEngine(settings.model, source, version=version, **_limits(settings, given))


def _vllm(settings: RolloutSettings, version: str) -> Engine:
    from dvp_rl.engines.vllm import VllmEngine
    from dvp_rl.engines.vllm_server import Launch, Remote, default_python

    for name in ("deterministic", "fp32_head"):
        if getattr(settings, name):
            raise ConfigError(f"{name}: vLLM does not have it; engine = transformers does, engine = sglang on a GPU")
    given = settings.vllm
    source: Launch | Remote
    if given.url is not None:
        source = Remote(**_reached(given.url, given))
    else:
        source = Launch(
            **given.model_dump(include={"gpu_memory_utilization", "cpu_kv_cache_gib"}),
            **_launched(settings, given, default_python()),
        )
    return VllmEngine(settings.model, source, version=version, **_limits(settings, given))


def _launched(settings: RolloutSettings, given: ServerSettings, default_python: Path) -> dict[str, Any]:
    """What the settings of every server that is started have in common."""
    return {
        "python": given.python or default_python,
        "extra_args": tuple(shlex.split(given.extra_args)),
        **settings.model_dump(include={"dtype", "device", "max_batch", "threads"}),
        **given.model_dump(include={"tp", "port", "ready_timeout_s", "log_file"}),
    }


def _reached(url: str, given: ServerSettings) -> dict[str, Any]:
    """Those of every server that runs elsewhere."""
    return {"url": url, "api_key": given.api_key.get_secret_value(), "ready_timeout_s": given.ready_timeout_s}


def _limits(settings: RolloutSettings, given: ServerSettings) -> dict[str, Any]:
    return {"max_context": settings.max_context, "load_timeout_s": given.load_timeout_s}
