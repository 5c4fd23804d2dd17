"""How an engine's probabilities differ from the trainer's: by bucket of pi_train, against bounds, along a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from dvp_rl.dvp.metrics import mis_health

from .engines import Engine
from .mismatch import EDGES, NEXT_TO_NOTHING, NUM_TAIL, SIGMAS, TAIL, Bucket, Estimate, Mismatch, measure, ratio
from .rules import NOTHING_PRUNED
from .sources import CPU, NOISE, Trainer, device_setting, opened, traces
from .study import Chart, Finding, Series, Study, Table, percent, short
from .subject import Progress, Subject

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

CAP = 2.0
"""Largest sequence weight that masked importance sampling (MIS) keeps."""
BUCKETS = tuple(f"{short(low)}–{short(high)}" if low else f"< {short(high)}" for low, high in pairwise(EDGES))


class Distance(NamedTuple):
    """How far an engine is from the trainer, in a token and in a whole sequence."""

    engine: str
    size: float
    """Mean |Delta| of the sampled tokens, in nats."""
    length: float
    """Mean length of the sequences, in tokens."""
    within: float
    """Share of sequences whose weight w = exp(sum of Delta) is in [1/CAP, CAP]."""
    kept_weight: float
    """Mean weight that MIS keeps, with CAP as its bound."""

    @classmethod
    def of(cls, engine: str, *parts: tuple[Float[Tensor, "N T"], Bool[Tensor, "N T"]]) -> Distance:
        """The distance in batches of sequences, each with its tokens' Delta, which is 0 off the mask, and its mask.
        Sequences without a token are left out."""
        sums = [torch.stack((delta.sum(1), delta.abs().sum(1), mask.sum(1).double())) for delta, mask in parts]
        every = torch.cat(sums, 1)
        log_w, sizes, lengths = every[:, every[-1] > 0]
        w = log_w.exp()
        return cls(
            engine,
            size=float(sizes.sum() / lengths.sum()),
            length=float(lengths.mean()),
            within=float(((w <= CAP) & (w >= 1 / CAP)).double().mean()),
            kept_weight=float(w.where(w <= CAP, 0.0).mean()),
        )


def signature(
    subject: Subject,
    engines: Sequence[Engine],
    num_tokens: int,
    seed: int,
    progress: Progress,
    device: torch.device = CPU,
) -> Study:
    """Samples each engine in turn, unpruned, from the same prompts."""
    trainer, found = Trainer(subject.folder, device), dict[Engine, Mismatch]()
    for number, engine in enumerate(engines):
        progress(number, len(engines), engine)
        with opened(engine, subject.folder, device) as source:
            found[engine] = measure(traces(source, trainer, subject.prompts, NOTHING_PRUNED, num_tokens, seed))
    settings = {
        "model": subject.words,
        **device_setting(device),
        "sequences of each engine": subject.num_prompts,
        "tokens of a sequence, at most": num_tokens,
        "seed": seed,
        "intervals": f"{SIGMAS:g} standard errors over sequences",
        "Gaussian control": f"s = {NOISE:g} on every logit, fresh",
    }
    return describe(found, settings)


def describe(found: Mapping[Engine, Mismatch], settings: dict[str, object]) -> Study:
    return Study(
        name="signature",
        title="The signature of the mismatch",
        abstract="Delta = log pi_train - log pi_infer of the same token after the same text, trainer in float32, "
        "sampled unpruned at temperature 1. Sums over a bucket of pi_train are exact, over the whole vocabulary.",
        settings=settings,
        findings=tuple(_findings(found)),
        charts=(*_accumulation(found), *(_engine_chart(e, m) for e, m in _visible(found).items())),
        tables=(_summary(found), _sequences(found), *(_bucket_table(e, m) for e, m in _visible(found).items())),
        notes=(
            "A negative mean of sampled tail tokens is no evidence of anything: for any noise, sampled mean <= "
            "log(P_train / P_infer) <= control mean. The sizes against s^2 and p are evidence.",
            "The prediction is for noise that is independent from token to token. An engine's error comes through the "
            "hidden state, moves related tokens together, and shifts whole buckets at a position; the contrast, in "
            "which a common shift cancels, says more about it than the sampled mean.",
            "s is the plain standard deviation over the vocabulary, in which the many unlikely tokens count most.",
        ),
        conclusion=conclusion(_distances(found)) if found.keys() - {Engine.GAUSSIAN} else (),
    )


def _distances(found: Mapping[Engine, Mismatch]) -> list[Distance]:
    """Distances of the engines that differ from the trainer; the control is no engine."""
    return [
        Distance.of(engine, (mismatch.delta, mismatch.mask))
        for engine, mismatch in _visible(found).items()
        if engine is not Engine.GAUSSIAN
    ]


def conclusion(found: Sequence[Distance]) -> tuple[str, ...]:
    """Sentences on the closest and the farthest of the engines that differ from the trainer."""
    if not found:
        return (f"No engine here differs from the trainer by more than {NEXT_TO_NOTHING:g} nats of KL per token.",)
    near, far = (extreme(found, key=lambda each: each.size) for extreme in (min, max))
    roles = {"the closest of these engines": near, "the farthest": far} if near is not far else {"": near}
    return (
        "After the same text, the engine that samples and the trainer give a token different probabilities.",
        *(_distance(role, end) for role, end in roles.items()),
    )


def _distance(role: str, found: Distance) -> str:
    return (
        f"{found.engine}{role and f', {role}'}: a token's probability is typically off by "
        f"{percent(math.expm1(found.size))}. These errors multiply: in samples of {found.length:.0f} tokens, "
        f"{percent(found.within)} of the sequences stay within a factor of {CAP:g} of the trainer's probability, and "
        f"masked importance sampling keeps {found.kept_weight:.2f} of the weight of a batch (near 1 is healthy, 1/2 is "
        "not)."
    )


def _visible(found: Mapping[Engine, Mismatch]) -> dict[Engine, Mismatch]:
    return {engine: mismatch for engine, mismatch in found.items() if mismatch.kl_token > NEXT_TO_NOTHING}


def _findings(found: Mapping[Engine, Mismatch]) -> list[Finding]:
    everything = {engine: mismatch.bucket(0, len(EDGES) - 1) for engine, mismatch in found.items()}
    pairs = sum(bucket.tokens for bucket in everything.values())
    exact = sum(bucket.beyond_exact for bucket in everything.values())
    first = sum(bucket.beyond_first_order for bucket in everything.values())
    buckets = [bucket for mismatch in found.values() for _, bucket in mismatch.buckets()]
    findings = [
        Finding("The exact range of Delta is never left.", exact == 0, f"{exact} of {pairs:,} tokens at a position"),
        Finding("Tokens beyond the first-order bound 2 eps_max (1 - p).", None, f"{first} of {pairs:,}"),
        Finding(
            "In every bucket, sampled mean <= log(P_train / P_infer) <= control mean, as for any noise.",
            all(bucket.is_ordered for bucket in buckets),
            f"{sum(bucket.is_ordered for bucket in buckets)} of {len(buckets)} buckets",
        ),
    ]
    if control := found.get(Engine.GAUSSIAN):
        met = [bucket.is_met for _, bucket in control.buckets()]
        statement = "On injected Gaussian noise, m - v is met within its interval in every bucket."
        findings.append(Finding(statement, all(met), f"{sum(met)} of {len(met)} buckets"))
    return findings + [_tail_finding(engine, mismatch) for engine, mismatch in _visible(found).items()]


def _tail_finding(engine: Engine, mismatch: Mismatch) -> Finding:
    tail = mismatch.bucket(0, NUM_TAIL)
    share = tail.contrast.value / tail.predicted_contrast
    return Finding(
        f"{engine}: Delta of sampled tokens with pi_train < {TAIL:g}, against the prediction for iid noise of its s.",
        None,
        f"{tail.sampled} against m - v = {short(tail.predicted_sampled)}; contrast {tail.contrast} against "
        f"-v = {short(tail.predicted_contrast)}, {share:.2f} of it",
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def _summary(found: Mapping[Engine, Mismatch]) -> Table:
    rows = []
    for engine, mismatch in found.items():
        tail, every = mismatch.bucket(0, NUM_TAIL), mismatch.bucket(0, len(EDGES) - 1)
        rows.append(
            (
                *(str(engine), mismatch.num_tokens, mismatch.size, mismatch.kl_token, mismatch.s, mismatch.s_of_kl),
                *(str(tail.sampled), tail.predicted_sampled, str(tail.contrast), tail.predicted_contrast),
                *(every.beyond_first_order, every.beyond_exact),
            )
        )
    return Table(
        f"Engines, and their tail (pi_train < {TAIL:g})",
        "|Delta|: mean over sampled tokens. KL(infer || train) per token, exact. s: standard deviation of a logit's "
        "noise, measured; s of KL: that of iid noise with this KL. Sampled: mean Delta of sampled tail tokens. "
        "Contrast: sampled minus pi_train-weighted control. Beyond: tokens outside the bound, and the exact range.",
        (
            *("engine", "tokens", "|Delta|", "KL", "s", "s of KL", "sampled", "m − v", "contrast", "−v"),
            *("beyond first order", "beyond exact"),
        ),
        tuple(rows),
    )


def _sequences(found: Mapping[Engine, Mismatch]) -> Table:
    rows = []
    for engine, mismatch in _visible(found).items():
        log_w, seen = mismatch.delta.sum(1), Distance.of(engine, (mismatch.delta, mismatch.mask))
        health = mis_health(mismatch.kl_token, seen.length, CAP)
        rows.append(
            (
                *(str(engine), seen.length, str(ratio(log_w, torch.ones_like(log_w))), -health.kl_sequence),
                *(seen.within, health.keep_two_sided, seen.kept_weight, health.kept_weight_upper),
            )
        )
    return Table(
        "Whole sequences",
        "log w = sum of Delta over a sequence. Predicted from KL and length for a normal log w: its mean -K, the share "
        "of weights in [1/2, 2], and the weight that w <= 2 keeps.",
        ("engine", "length", "mean log w", "−K", "in [1/2, 2]", "predicted", "kept weight", "predicted "),
        tuple(rows),
    )


def _bucket_table(engine: Engine, mismatch: Mismatch) -> Table:
    def row(number: int, bucket: Bucket) -> tuple[object, ...]:
        return (
            *(BUCKETS[number], bucket.mass, str(bucket.sampled), bucket.predicted_sampled, bucket.middle),
            *(str(bucket.control), bucket.predicted_control, str(bucket.contrast), bucket.predicted_contrast),
        )

    return Table(
        f"{engine} by bucket of pi_train",
        f"s = {short(mismatch.s)}. Middle: log(P_train / P_infer) of the bucket.",
        ("pi_train", "share", "sampled", "m − v", "middle", "control", "m", "contrast", "−v"),
        tuple(row(number, bucket) for number, bucket in mismatch.buckets()),
    )


# --- charts -----------------------------------------------------------------------------------------------------------


class Means(Protocol):
    """Measured and predicted means of one bucket."""

    @property
    def sampled(self) -> Estimate: ...
    @property
    def control(self) -> Estimate: ...
    @property
    def contrast(self) -> Estimate: ...
    @property
    def predicted_sampled(self) -> float: ...
    @property
    def predicted_control(self) -> float: ...
    @property
    def predicted_contrast(self) -> float: ...


def bucket_chart(name: str, s2: float, numbers: Sequence[int], buckets: Sequence[Means]) -> Chart:
    x = tuple(map(float, range(len(numbers))))

    def points(label: str, estimates: list[Estimate], style: str, colour: int) -> Series:
        values = tuple(e.value / s2 for e in estimates)
        low, high = tuple(e.low / s2 for e in estimates), tuple(e.high / s2 for e in estimates)
        return Series(label, x, values, low, high, style, colour)

    def line(label: str, values: list[float], colour: int) -> Series:
        return Series(label, x, tuple(value / s2 for value in values), style="--", colour=colour)

    return Chart(
        title=f"{name}: Delta by pi_train",
        caption=f"In units of s² = {short(s2)}. Dashed: predicted for iid noise.",
        x_label="pi_train",
        y_label="mean Delta / s²",
        series=(
            points("sampled", [b.sampled for b in buckets], "o", 0),
            line("m − v", [b.predicted_sampled for b in buckets], 0),
            points("weighted by pi_train", [b.control for b in buckets], "s", 1),
            line("m", [b.predicted_control for b in buckets], 1),
            points("contrast", [b.contrast for b in buckets], "D", 2),
            line("−v", [b.predicted_contrast for b in buckets], 2),
        ),
        ticks=tuple(BUCKETS[number] for number in numbers),
    )


def _engine_chart(engine: Engine, mismatch: Mismatch) -> Chart:
    numbers, buckets = zip(*mismatch.buckets(), strict=True)
    return bucket_chart(engine, mismatch.s**2, numbers, buckets)


def _accumulation(found: Mapping[Engine, Mismatch]) -> tuple[Chart, ...]:
    series = []
    for colour, (engine, mismatch) in enumerate(_visible(found).items()):
        lengths, seen, predicted = _growth(mismatch)
        series.append(Series(str(engine), lengths, seen, style="-", colour=colour))
        series.append(Series("", lengths, predicted, style="--", colour=colour))
    if not series:
        return ()
    caption = (
        "Root mean square of log w, the sum of Delta over the first t tokens. Dashed: √(2K + K²), as for a normal "
        "log w of mean −K."
    )
    return (Chart("Along a sequence", caption, "tokens t", "log w (nats)", tuple(series), x_log=True, y_log=True),)


def _growth(mismatch: Mismatch) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Lengths up to the median, and at each the root mean square of log w: measured, and predicted from the KL."""
    last = int(mismatch.mask.sum(1).median())
    lengths = sorted({round(math.exp(x)) for x in torch.linspace(0, math.log(last), 24).tolist()})
    long = mismatch.mask[:, last - 1]
    log_w, K = mismatch.delta[long].cumsum(1), mismatch.kl[long].cumsum(1).mean(0)
    seen = [float(log_w[:, t - 1].square().mean().sqrt()) for t in lengths]
    predicted = [math.sqrt(float(2 * K[t - 1] + K[t - 1].square())) for t in lengths]
    return tuple(map(float, lengths)), tuple(seen), tuple(predicted)
