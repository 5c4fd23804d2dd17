"""The trainer's metrics for Prometheus, served over HTTP while it trains."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dvp_rl.contract.http import Health
from dvp_rl.contract.metrics import KNOWN, mean_of
from dvp_rl.http.api_tokens import ApiTokens
from dvp_rl.http.application import application
from dvp_rl.http.server import bound, http_server
from dvp_trainer.config import MetricsSection
from dvp_trainer.learn.step import STALENESS_BINS

from .sinks import Sink

logger = logging.getLogger(__name__)

DESCRIPTION = "The metrics of one trainer, while it trains."


class Shown(NamedTuple):
    """A gauge with the value of the newest step that has one."""

    name: str
    text: str
    label: str
    keys: dict[str, str]
    """Maps each value of the label to a key of a step's metrics."""

    @property
    def labels(self) -> list[str]:
        return [self.label] if self.label else []


GAUGES = (
    Shown("reward_mean", "Mean reward of the batch", "", {"": "reward/mean"}),
    Shown("heldout_score", "Score on the held-out prompts", "", {"": "heldout/score"}),
    Shown(
        "kl_nats",
        "KL from the replicas' policy to the trainer's, on sampled tokens",
        "policy",
        {"constrained": "mismatch/kl", "full": "mismatch/kl_unmasked"},
    ),
    Shown(
        "vetoed_ratio",
        "Share of sequences that the veto drops",
        "reason",
        {"outside": "veto/outside", "numerical": "veto/numerical", "nan": "veto/nan"},
    ),
    Shown("masked_ratio", "Share of importance weights above the bound", "", {"": "mis/fraction"}),
    Shown(
        "kept_mass_ratio",
        "Probability kept by pruning, mean over positions",
        "side",
        {"trainer": "kept/mass_mean_train", "replicas": "kept/mass_mean_infer"},
    ),
    Shown("gradient_norm", "Norm of the gradient before clipping", "", {"": "grad/norm"}),
    Shown("completion_length_tokens", "Tokens per completion, mean of the batch", "", {"": "length/mean"}),
    Shown(
        "episode_mean",
        "What was counted per episode that a harness played, mean of the batch",
        "counted",
        {name: mean_of(name) for name in KNOWN},
    ),
)
PHASES = ("wait", "train", "publish", "eval")
OUTCOMES = ("filtered", "dead", "stale", "refused", "duplicates")


class PrometheusSink(Sink):
    """A metrics sink. Counters start at zero with this process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._step = Gauge("dvp_trainer_step", "Batches trained since the run began", registry=registry)
        self._ended = Gauge("dvp_trainer_last_step_timestamp_seconds", "When the last step ended", registry=registry)
        self._updates = Counter("dvp_trainer_updates", "Optimizer steps", registry=registry)
        self._phases = Counter("dvp_trainer_phase_seconds", "Trainer time by phase", ["phase"], registry=registry)
        self._groups = Counter("dvp_trainer_unused_groups", "Unused groups by reason", ["outcome"], registry=registry)
        self._staleness = Histogram(
            "dvp_trainer_staleness_steps",
            "Batches that changed the weights between sampling a group and training on it",
            buckets=range(STALENESS_BINS),
            registry=registry,
        )
        self._gauges = [
            (shown, Gauge(f"dvp_trainer_{shown.name}", shown.text, shown.labels, registry=registry)) for shown in GAUGES
        ]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step.set(step)
        self._ended.set_to_current_time()
        self._updates.inc(metrics.get("optimizer/updates", 0.0))
        for phase in PHASES:
            self._phases.labels(phase).inc(metrics.get(f"time/{phase}_s", 0.0))
        for outcome in OUTCOMES:
            self._groups.labels(outcome).inc(metrics.get(f"groups/{outcome}", 0.0))
        for behind in range(STALENESS_BINS + 1):
            for _ in range(int(metrics.get(f"staleness/groups_{behind}", 0.0))):
                self._staleness.observe(behind)
        for shown, gauge in self._gauges:
            for value, key in shown.keys.items():
                if key in metrics:
                    (gauge.labels(value) if shown.label else gauge).set(metrics[key])


@asynccontextmanager
async def exporting(settings: MetricsSection) -> AsyncIterator[PrometheusSink | None]:
    """Serves a sink's metrics until the block ends; None if no port is set. Raises ConfigError if the port is taken."""
    if settings.port is None:
        yield None
        return
    tokens = settings.tokens()
    with bound(settings.host, settings.port) as listener:
        logger.info("metrics on http://%s:%d/metrics", settings.host, listener.getsockname()[1])
        sink = PrometheusSink()
        http = http_server(_app(sink, tokens, settings.max_requests), 0, settings.max_requests)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            yield sink
        finally:
            http.should_exit = True
            await serving


def _app(sink: PrometheusSink, tokens: ApiTokens, max_requests: int) -> FastAPI:
    router = APIRouter()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(generate_latest(sink.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/healthz")
    async def healthz() -> Health:
        """200 while this process answers. A supervisor restarts what does not."""
        return Health(status="ok")

    return application("dvp-train", DESCRIPTION, router, tokens, max_requests=max_requests)
