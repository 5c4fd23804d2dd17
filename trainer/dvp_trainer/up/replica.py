"""How dvp-rollout serves a run."""

from __future__ import annotations

from collections.abc import Mapping

from dvp_trainer.config import TrainSettings


def options_of_replica(settings: TrainSettings) -> dict[str, object]:
    """Options of dvp-rollout that follow from the run's settings, but for the broker's URL."""
    model, up = settings.model, settings.up
    options: dict[str, object] = {
        "model": model.path,
        "engine": up.engine,
        "device": "cuda" if up.gpus else model.device,
        "dtype": up.dtype or model.compute_dtype,
        "run_id": settings.run_id,
    }
    if model.fixed_shape is not None:
        options["fixed_shape"] = model.fixed_shape
    if model.fp32_head:
        options["fp32_head"] = True
    if settings.deterministic:
        options["deterministic"] = True
    return options


def flags(options: Mapping[str, object]) -> list[str]:
    """The options as a command line has them. Truth values become switches."""
    words = {name.replace("_", "-"): value for name, value in options.items()}
    switches = {True: "--{}", False: "--no-{}"}
    return [
        switches[value].format(name) if isinstance(value, bool) else f"--{name}={value}"
        for name, value in words.items()
    ]
