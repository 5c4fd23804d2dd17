"""Opens a run, with everything from the lease to the reward processes, and closes it in reverse order."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any, Literal

import torch

from dvp_rl.contract.completions import COMPLETIONS
from dvp_rl.contract.errors import ConfigError, UnavailableError
from dvp_rl.contract.weights import WeightRoute
from dvp_rl.engines.threads import num_threads
from dvp_rl.engines.tokenizer import Tokenizer, load_tokenizer
from dvp_rl.hooks import is_hook, load_hook
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.replicas import ReplicaRegistry
from dvp_rl.transport.roles import Role
from dvp_rl.transport.submission import Submission
from dvp_rl.weights.registry import WeightRegistry
from dvp_rl.weights.transfers import Transfers

from .config import EvalSettings, TrainSettings
from .data.prompts import Prompts
from .data.rendering import (
    TRIAL_ROWS,
    Asked,
    compare_data,
    open_heldout,
    open_tokenizer,
    open_training,
    own_template,
)
from .data.reward_failures import RewardFailures
from .data.reward_pool import RewardPool
from .data.scoring import Scorer
from .ending import conclude
from .learn.hooks import BASELINE, OBJECTIVE
from .learn.step import Learner, open_learner
from .learn.world import World
from .loop import Run
from .options import Overlong
from .patience import patient
from .publish.publisher import Publisher
from .publish.sender import Sender
from .queue.evaluator import Evaluator
from .queue.feeder import Feeder
from .report.prometheus import PrometheusSink, exporting
from .report.sinks import (
    CompletionsSink,
    JsonlSink,
    OwnSink,
    Reporter,
    Sink,
    TensorboardSink,
    console_sink,
    import_tracker,
    trackio_sink,
    wandb_sink,
)
from .report.starts import Start, changes, describe_start, read_starts, that_trained, write_start
from .resume.checkpoint import Checkpoints, Progress, unreadable
from .resume.ledger import SUBMITTED
from .up.launch import Local

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_run(
    settings: TrainSettings, world: World | None = None, local: Local | None = None
) -> AsyncIterator[Run]:
    """A run ready to train: resumed if there is a checkpoint, its weights announced, its background tasks running. When
    it is closed, whatever the reason, its report is written, and how it stands is printed. `local`: its broker and
    replicas, if this process has started them."""
    async with (
        AsyncExitStack() as after,
        exporting(settings.metrics) as exporter,
        _watched(local),
        _assemble(settings, None, world or World(), local) as run,
    ):
        await run.feeder.restore(run.resumed_from)
        start = await asyncio.to_thread(record_start, run, up=local is not None)
        after.callback(conclude, start, settings.out_dir, html=settings.report.html)
        run.reporter = open_reporter(settings, start, exporter, resumed_step=run.step or None)
        try:
            async with _beside(run.beat(), run.feeder.run(), *run.sending()):
                if settings.evaluate.interval and not run.step:
                    run.reporter.log(0, await run.evaluate())
                    await run.save()  # it is the best so far, and `dvp-train eval` may need it
                yield run
        finally:
            run.reporter.close()
            run.feeder.close()


@asynccontextmanager
async def open_evaluation(
    settings: EvalSettings, world: World | None = None, local: Local | None = None
) -> AsyncIterator[Run]:
    """A run with the weights of one checkpoint announced and no prompts submitted for training."""
    if settings.data.heldout is None:
        raise ConfigError("data.heldout is not set: there is nothing to evaluate on")
    async with _watched(local), _assemble(settings, settings.step, world or World(), local) as run:
        run.finished = run.step >= settings.steps
        async with _beside(run.beat(), *run.sending()):
            yield run


@asynccontextmanager
async def _beside(*background: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs coroutines beside the body until it ends. If one fails, the body is cancelled and the error is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in background]
        yield
        for task in tasks:
            task.cancel()


def _watched(local: Local | None) -> AbstractAsyncContextManager[None]:
    return nullcontext() if local is None else _beside(local.watch())


@asynccontextmanager
async def _assemble(
    settings: TrainSettings, which: Literal["best", "last"] | int | None, world: World, local: Local | None
) -> AsyncIterator[Run]:
    """Assembles the run. Cheap checks come first, so that a user's mistake shows before a lease is taken or a model
    loaded."""
    settings.weights.read_token()
    check_hooks(settings)
    check_device(settings.model.device)
    tokenizer = open_tokenizer(settings)
    with patient("reading the prompts"):
        prompts, heldout = open_training(settings, tokenizer), open_heldout(settings, tokenizer)
    if heldout is not None:
        compare_data(prompts, heldout, settings.evaluate.limit)
    checkpoints = Checkpoints(settings.out_dir / "checkpoints", settings.checkpoint.keep)
    set_up_torch(settings)
    async with AsyncExitStack() as stack:
        scorer, heldout_scorer = await stack.enter_async_context(
            scoring(settings, tokenizer, prompts, heldout, trains=which is None)
        )
        url, patience_s = local.broker_url if local else settings.broker.url, settings.broker.stall_timeout_s
        own = (
            " (`dvp-train up` starts one, and replicas)" if local is None and settings.broker.redis_url is None else ""
        )
        with patient(f"waiting for the broker{own}"):
            connected = await Broker.connect(url, settings.run_id, role=Role.TRAINER, patience_s=patience_s)
        broker = await stack.enter_async_context(connected)
        lease = TrainerLease(
            broker,
            f"dvp-train in {settings.out_dir}",
            ttl_s=settings.broker.lease_s,
            above=checkpoints.newest_token(),
        )
        fence = await stack.enter_async_context(lease.held())
        checkpoints.claim(fence)

        with patient("loading the model"):
            learner = await asyncio.to_thread(open_learner, settings, tokenizer.pad_id, world)
            progress = await asyncio.to_thread(restore, settings, checkpoints, learner, prompts, which)
        replicas, submission, groups = ReplicaRegistry(broker), Submission(broker), GroupQueue(broker, fence=fence)
        template = own_template(settings, tokenizer)
        publisher = Publisher(learner.write_weights, WeightRegistry(broker), replicas, settings, fence, template)
        sender = None
        if settings.weights.route is WeightRoute.DISTRIBUTED:
            sender = Sender(lambda: publisher.announced, Transfers(broker), settings.weights, settings.model.device)
        with patient("publishing the weights"):
            await publisher.publish(progress.weight_steps, after=progress.seq)
        evaluator = None
        if heldout and heldout_scorer:
            asked = Asked(heldout, tokenizer, settings)
            evaluator = Evaluator(settings, asked, heldout_scorer, submission, groups, publisher, fence)
        yield Run(
            settings=settings,
            learner=learner,
            feeder=Feeder(settings, Asked(prompts, tokenizer, settings), scorer, submission, groups, publisher, fence),
            publisher=publisher,
            sender=sender,
            evaluator=evaluator,
            checkpoints=checkpoints,
            replicas=replicas,
            resumed_from=progress,
            step=progress.step,
            weight_steps=progress.weight_steps,
            samples=progress.samples,
            best=progress.best,
        )


def follow(settings: TrainSettings, world: World) -> None:
    """Runs a rank that does not lead: loads its part of the model and obeys the leader's orders."""
    tokenizer = load_tokenizer(settings.model.path)
    set_up_torch(settings)
    learner = open_learner(settings, tokenizer.pad_id, world)
    for order in world.orders():
        try:
            learner.obey(order)
        except OSError as error:  # the leader also ends, with a message that names the remedy
            raise UnavailableError(f"rank {world.rank}: {order.name}: {error}") from error


def check_hooks(settings: TrainSettings) -> None:
    """Imports the functions and trackers that the settings name, so that a typo shows at once. Raises ConfigError. Data
    and reward functions are imported when data and reward pool are opened."""
    correction = settings.correction
    for library, project in (("trackio", settings.report.trackio_project), ("wandb", settings.report.wandb_project)):
        if project is not None:
            import_tracker(library, project)
    for setting, name in (
        (BASELINE, correction.baseline),
        (OBJECTIVE, correction.objective),
        *(("report.sinks", sink) for sink in settings.report.sinks),
    ):
        if name is not None and is_hook(name):
            load_hook(setting, name)


def check_device(name: str) -> None:
    """Raises ConfigError unless PyTorch can compute on the device."""
    try:
        torch.ones(2, device=name).sum().item()
    except (RuntimeError, AssertionError, ImportError) as error:  # without CUDA PyTorch asserts; meta has no values
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"model.device {name!r} cannot be used: {reason}") from None


@asynccontextmanager
async def scoring(
    settings: TrainSettings, tokenizer: Tokenizer, prompts: Prompts, heldout: Prompts | None, *, trains: bool
) -> AsyncIterator[tuple[Scorer, Scorer | None]]:
    """Scorers of training and held-out completions, tried on the first rows. Raises ConfigError as `try_on` does."""
    reward = settings.reward
    async with RewardPool(
        reward.name, workers=reward.workers, timeout_s=reward.timeout_s, memory_mib=reward.memory_mib
    ) as pool:
        failures = RewardFailures(
            reward, settings.out_dir, prompts.source, patience=settings.batch.groups * settings.sampling.n
        )
        scorer = Scorer(pool, tokenizer, reward, failures)
        if trains:
            with patient("trying the reward on the first rows"):
                await scorer.try_on(prompts.first(TRIAL_ROWS), settings.sampling.n)
        if heldout is None:
            yield scorer, None
            return
        num = min(len(heldout), settings.evaluate.limit or len(heldout))
        failures = RewardFailures(reward, settings.out_dir, heldout.source, patience=num * settings.evaluate.n)
        plain = Scorer(pool, tokenizer, reward.model_copy(update={"overlong": Overlong.KEEP}), failures)
        if settings.evaluate.interval or not trains:
            with patient("trying the reward on the first held-out rows"):
                await plain.try_on(heldout.first(TRIAL_ROWS), settings.evaluate.n)
        yield scorer, plain


def set_up_torch(settings: TrainSettings) -> None:
    reproducible = settings.deterministic or settings.model.fixed_shape is not None
    torch.set_num_threads(num_threads(settings.threads, reproducible=reproducible))
    torch.manual_seed(settings.seed)
    if settings.deterministic:
        # CUDA matrix products are deterministic only with this setting, which cuBLAS reads at first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def restore(
    settings: TrainSettings,
    checkpoints: Checkpoints,
    learner: Learner,
    prompts: Prompts,
    which: Literal["best", "last"] | int | None,
) -> Progress:
    """Loads a checkpoint into the learner and returns its progress, or a fresh Progress if there is none and `which` is
    None. Raises ConfigError."""
    found = checkpoints.load("last" if which is None else which)
    if found is None:
        if which is not None:
            raise ConfigError(f"out_dir {settings.out_dir} holds no checkpoint to evaluate")
        if (settings.out_dir / SUBMITTED).exists():
            logger.warning(
                "no checkpoint in %s: the run begins at step 0, and its ledgers are emptied", checkpoints.root
            )
        return Progress(data_fingerprint=prompts.fingerprint)
    progress, state = found
    check_base(settings, learner)
    check_resumable(settings, progress, prompts)
    try:
        learner.load(state)
    except ConfigError:
        raise
    except Exception as error:  # PyTorch raises many types for a damaged folder
        raise unreadable(state.parent, error) from error
    logger.info("resumed from %s at step %d", checkpoints.folder(progress.step), progress.step)
    return progress


def check_resumable(settings: TrainSettings, progress: Progress, prompts: Prompts) -> None:
    """Raises ConfigError if a run with these settings and prompts must not continue from a checkpoint."""
    if not settings.resume:
        raise ConfigError(
            f"out_dir {settings.out_dir} holds a checkpoint of step {progress.step} and resume is off; "
            "name another out_dir and run_id, or move the folder away"
        )
    if progress.data_fingerprint != prompts.fingerprint:
        raise ConfigError(
            f"data.train {settings.data.train} (with its order, limit, seed and chat settings) is not what the "
            f"checkpoint of step {progress.step} was trained on: fingerprint {prompts.fingerprint}, expected "
            f"{progress.data_fingerprint}. Restore data set and settings, or start a new run"
        )


def check_base(settings: TrainSettings, learner: Learner) -> None:
    """Raises ConfigError if the adapters of the checkpoint were trained on another model: it holds only them."""
    starts = read_starts(settings.out_dir)
    if settings.lora.rank and starts and starts[-1].model != learner.base_digest:
        raise ConfigError(
            f"model.path {settings.model.path} has digest {learner.base_digest}, but the adapters in "
            f"{settings.out_dir} were trained on a folder of digest {starts[-1].model}: restore it, or start a new run"
        )


def record_start(run: Run, *, up: bool) -> Start:
    """Writes down what this start is made from, unless there is nothing left to train. Returns the newest start that is
    written down. Raises ConfigError (disk full)."""
    settings, learner = run.settings, run.learner
    device = torch.device(settings.model.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    start = describe_start(
        settings,
        step=run.step,
        up=up,
        model=learner.base_digest,
        chat_template=run.publisher.chat_template,
        roles=run.feeder.asked.prompts.row_at(0).roles,
        machine={"device": f"{device}, {name}", "ranks": str(learner.world.size)},
    )
    earlier = read_starts(settings.out_dir)
    changed = changes(that_trained(earlier, run.step)[-1], start) if earlier and run.step else {}
    if earlier and run.step >= settings.steps:
        logger.info("nothing to train: %d batches are trained, and steps = %d", run.step, settings.steps)
        if without := [text for name, text in changed.items() if name != "steps"]:
            logger.warning(
                "without effect: %s; to train another run, change run_id and out_dir, too", ", ".join(without)
            )
        return earlier[-1]
    if changed:
        logger.info("settings changed after step %d: %s", run.step, ", ".join(changed.values()))
    if start.step and earlier and earlier[-1].model != start.model:
        logger.warning(
            "model.path %s is not what it was at the last start (digest %s, then %s): its weights come from the "
            "checkpoint, but its config and tokenizer are new",
            settings.model.path,
            start.model,
            earlier[-1].model,
        )
    write_start(start, settings, settings.out_dir)
    return start


def open_reporter(
    settings: TrainSettings, start: Start, exporter: PrometheusSink | None, *, resumed_step: int | None
) -> Reporter:
    out = settings.out_dir
    sinks: list[Sink] = [
        JsonlSink(out / "metrics.jsonl", resumed_step=resumed_step),
        CompletionsSink(out / COMPLETIONS, resumed_step=resumed_step),
    ]
    if exporter is not None:
        sinks.append(exporter)
    if settings.report.tensorboard:
        sinks.append(TensorboardSink(out / "tensorboard", start, resumed_step=resumed_step))
    if settings.report.wandb_project is not None:
        sinks.append(wandb_sink(settings.report.wandb_project, start, out))
    if settings.report.trackio_project is not None:
        sinks.append(trackio_sink(settings.report.trackio_project, start))
    sinks += [OwnSink(name, out, run_id=settings.run_id, resumed_step=resumed_step) for name in settings.report.sinks]
    sinks.append(console_sink(settings.steps))  # last: it takes the terminal, and a sink above may refuse
    return Reporter(sinks)
