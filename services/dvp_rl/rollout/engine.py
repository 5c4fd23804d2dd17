"""Builds the engine that the settings name, and imports only the libraries of that engine."""

from __future__ import annotations

import shlex

from dvp_rl.contract.engine import EngineName
from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.shape import Shape
from dvp_rl.contract.weights import INITIAL_SEQ, WeightVersion
from dvp_rl.engines.protocol import Engine
from dvp_rl.engines.sglang_server import Launch, Remote, default_python
from dvp_rl.extras import pip_install
from dvp_rl.hooks import call_hook, check_members, load_hook
from dvp_rl.weights.folder import folder_digest

from .prompts import Prompts
from .settings import RolloutSettings, SglangSettings

FAKE_CONTEXT = 4096
ENGINE_ATTRIBUTES = ("facts", "context_length", "vocab_size", "capacity", "job_by_job", "version", "num_running")
ENGINE_METHODS = ("start", "generate", "load", "close")
"""What `Engine` asks of an engine."""
LAUNCHED_ALIKE = {
    "tp",
    "dp",
    "mem_fraction_static",
    "max_total_tokens",
    "port",
    "ready_timeout_s",
    "log_file",
    "interface",
}
"""Settings of [sglang] that `Launch` has under the same name."""


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
    return _own(settings, version)


def _own(settings: RolloutSettings, version: str) -> Engine:
    engine: Engine = call_hook("engine", load_hook("engine", settings.engine), settings, version=version)
    check_members("engine", engine, attributes=ENGINE_ATTRIBUTES, methods=ENGINE_METHODS)
    return engine


def _sglang(settings: RolloutSettings, version: str) -> Engine:
    from dvp_rl.engines.sglang import SglangEngine

    source = _launch(settings) if settings.sglang.url is None else _remote(settings.sglang, settings.sglang.url)
    return SglangEngine(
        settings.model,
        source,
        max_context=settings.max_context,
        load_timeout_s=settings.sglang.load_timeout_s,
        version=version,
    )


def _launch(settings: RolloutSettings) -> Launch:
    return Launch(
        python=settings.sglang.python or default_python(),
        dtype=settings.dtype,
        fp32_head=settings.fp32_head,
        device=settings.device,
        max_batch=settings.max_batch,
        deterministic=settings.deterministic,
        threads=settings.threads,
        extra_args=tuple(shlex.split(settings.sglang.extra_args)),
        **settings.sglang.model_dump(include=LAUNCHED_ALIKE),
    )


def _remote(given: SglangSettings, url: str) -> Remote:
    return Remote(
        url,
        api_key=given.api_key.get_secret_value(),
        admin_key=given.admin_key.get_secret_value(),
        ready_timeout_s=given.ready_timeout_s,
    )
