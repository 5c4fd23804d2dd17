"""The constrained policy pi_mp: min-p as a set over the vocabulary, renormalised.

    S              = { a : z_a - max_k z_k >= tau * log(rho) }
    log pi_mp(a)   = z_a / tau - logsumexp_{k in S} z_k / tau     for a in S
    kept mass      = sum_{k in S} softmax(z / tau)_k

Trainer, Transformers engine, SGLang and vLLM all run this code. Shapes: `*batch` is any leading shape, including
an empty one; `vocab` is the vocabulary. Everything is computed in float32, or in float64 if the logits are float64.
Settings (`log_min_p`, `temperature`) are floats or tensors that broadcast to `*batch`, preferably float64: the product
tau * log(rho) is formed in float64 and rounded once. `log_min_p` = -inf prunes nothing.

A logit of -inf is a token of probability zero. A row with NaN, +inf or no finite logit has NaN log-probs and an empty
set, so its token also counts as outside.
"""

from __future__ import annotations

import math
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float, Int

Setting: TypeAlias = float | Tensor

OUTSIDE_LOGIT = -50.0
"""Placeholder for (z_a - max z) / tau of a token outside S. It is finite, because an infinity gives NaN gradients in
low precision, and relative to the maximum, because an absolute value fails where logits are low."""

CPU_BLOCK, DEVICE_BLOCK = 2**18, 2**24
"""Logits per block of rows: 1 MiB of float32 stays in a CPU's cache, 64 MiB fills a GPU. Either way the working copies
stay small beside a [tokens, 152k] tensor."""


class Constrained(NamedTuple):
    """Log-probs of given tokens, and the sets they were taken under."""

    logprobs: Float[Tensor, "*batch"]
    """log pi_mp(a). Outside S it is OUTSIDE_LOGIT - logsumexp_S, at most -50, with gradient zero. The only
    output with a gradient."""
    kept_mass: Float[Tensor, "*batch"]
    """Full-softmax probability of S at the same temperature, in (0, 1]."""
    kept_count: Int[Tensor, "*batch"]
    """Size of S, int32, at least 1."""
    inside: Bool[Tensor, "*batch"]
    """The token is a member of S. Veto by this flag, never by the size of the log-prob."""


class Block(NamedTuple):
    """A block of rows under the constrained policy."""

    scaled: Float[Tensor, "rows vocab"]
    """(z - max z) / tau."""
    keep: Float[Tensor, "rows vocab"]
    """1 on S, 0 off it."""
    weight: Float[Tensor, "rows vocab"]
    """exp(scaled) on S, 0 off it."""
    kept: Float[Tensor, "rows 1"]
    """Sum of exp(scaled) over S, in [1, |S|]."""
    total: Float[Tensor, "rows 1"]
    """Sum of exp(scaled) over the vocabulary."""

    def read(self, token_ids: Int[Tensor, "rows 1"]) -> Constrained:
        inside = self.keep.gather(-1, token_ids).bool()
        logits = self.scaled.gather(-1, token_ids).masked_fill(~inside, OUTSIDE_LOGIT)
        count = self.keep.sum(-1).int()
        logprobs, mass = logits - self.kept.log(), self.kept / self.total
        return Constrained(logprobs.squeeze(-1), mass.squeeze(-1), count, inside.squeeze(-1))


@torch.no_grad()
def safe_set(
    logits: Float[Tensor, "*batch vocab"], *, log_min_p: Setting, temperature: Setting
) -> Bool[Tensor, "*batch vocab"]:
    """S as a mask. The maximum of a finite row, and every token that ties with it, is always a member."""
    rows, threshold, _ = as_rows(logits, log_min_p, temperature)
    return (shift(rows) >= threshold).view(logits.shape)


def constrained_logprobs(
    logits: Float[Tensor, "*batch vocab"],
    token_ids: Int[Tensor, "*batch"],
    *,
    log_min_p: Setting,
    temperature: Setting,
) -> Constrained:
    """log pi_mp of one token per row, differentiable (once) in the logits with S held constant.

    The only [.., vocab] tensor kept for the backward is the logits. Raises ValueError if the shapes do not match or a
    float temperature or log_min_p is out of range.
    """
    if token_ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)}, expected {tuple(logits.shape[:-1])} to match the logits"
        )
    rows, threshold, tau = as_rows(logits, log_min_p, temperature)
    outputs = _ConstrainedLogprobs.apply(rows, token_ids.reshape(-1, 1), threshold, tau)  # type: ignore[no-untyped-call]
    return Constrained(*(output.view(token_ids.shape) for output in outputs))


def full_logprobs(
    logits: Float[Tensor, "*batch vocab"], token_ids: Int[Tensor, "*batch"], *, temperature: Setting
) -> Float[Tensor, "*batch"]:
    """log softmax(z / tau) of one token per row: the policy without pruning."""
    return constrained_logprobs(logits, token_ids, log_min_p=-math.inf, temperature=temperature).logprobs


@torch.no_grad()
def entropy(
    logits: Float[Tensor, "*batch vocab"], *, log_min_p: Setting, temperature: Setting
) -> Float[Tensor, "*batch"]:
    """-sum_S pi_mp log pi_mp in nats, without gradient; the full entropy at log_min_p = -inf."""
    blocks = (constrain(*block) for block in split_rows(*as_rows(logits, log_min_p, temperature)))
    parts = [torch.special.entr(block.weight.div_(block.kept)).sum(-1) for block in blocks]
    return torch.cat(parts).view(logits.shape[:-1])


def constrain(
    rows: Float[Tensor, "rows vocab"], threshold: Tensor, temperature: Tensor, peak: Tensor | None = None
) -> Block:
    """Computes the policy; `prune` takes fewer passes for the set and its mass alone. Must run without gradient.

    With `peak` [rows, 1], the largest logit of each row, `rows` may hold any part of the vocabulary; sums then cover
    that part.
    """
    shifted = shift(rows, peak)
    keep = membership(shifted, threshold)
    scaled = shifted.div_(temperature)
    weight = scaled.exp()
    total = weight.sum(-1, keepdim=True)
    # All weights of a finite row are finite, so a product can select; in other rows it keeps the NaN visible.
    weight.mul_(keep)
    return Block(scaled, keep, weight, weight.sum(-1, keepdim=True), total)


def shift(logits: Tensor, peak: Tensor | None = None) -> Tensor:
    """z - max z as a new tensor. The shift comes first, because it is exact where membership is decided."""
    z = logits.to(_working_dtype(logits))
    peak = z.amax(-1, keepdim=True) if peak is None else peak
    return z - (peak + (peak - peak))  # a row with an infinite maximum becomes NaN, which is a member of no set


def membership(shifted: Float[Tensor, "rows vocab"], threshold: Tensor) -> Float[Tensor, "rows vocab"]:
    """1 on S, 0 off it, as floats: a CPU compares, multiplies and sums them several times faster than booleans."""
    return torch.ge(shifted, threshold, out=torch.empty_like(shifted))


def logit_gradient(
    block: Block, token_ids: Int[Tensor, "rows 1"], slope: Float[Tensor, "rows 1"], inside: Bool[Tensor, "rows 1"]
) -> Float[Tensor, "rows vocab"]:
    """slope * (1[k = a] - pi_mp(k)), exactly zero off S and in rows with an outside token. Reuses `block.weight`."""
    partial = block.weight.mul_(-slope / block.kept).scatter_add_(-1, token_ids, slope)
    return partial.masked_fill_(~inside, 0.0)


def as_rows(logits: Tensor, log_min_p: Setting, temperature: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """The logits as [rows, vocab]; threshold and temperature in the working dtype, as scalars or [rows, 1]. Raises
    ValueError if a float setting is out of range."""
    if isinstance(temperature, (int, float)) and not 0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature} must be a finite number > 0")
    if isinstance(log_min_p, (int, float)) and not log_min_p <= 0:
        raise ValueError(f"log_min_p {log_min_p} must be <= 0 (min_p in (0, 1])")
    dtype, leading = _working_dtype(logits), logits.shape[:-1]
    tau = torch.as_tensor(temperature, dtype=torch.float64)
    threshold = tau * torch.as_tensor(log_min_p, dtype=torch.float64)
    rows = logits.reshape(-1, logits.shape[-1])
    return rows, as_column(threshold.to(dtype), leading), as_column(tau.to(dtype), leading)


def as_column(setting: Tensor, leading: torch.Size) -> Tensor:
    """The setting as [rows, 1]. A scalar stays a scalar; even on the CPU it mixes with tensors of any device."""
    return setting.expand(leading).reshape(-1, 1) if setting.dim() else setting


def split_rows(rows: Tensor, *columns: Tensor, size: int | None = None) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of `size` rows (None: of CPU_BLOCK or DEVICE_BLOCK logits) with their part of each column. One empty block
    if there are no rows."""
    if size is None:
        size = max(1, (CPU_BLOCK if rows.device.type == "cpu" else DEVICE_BLOCK) // rows.shape[-1])
    pieces = (torch.split(column, size) if column.dim() else repeat(column) for column in columns)
    return zip(torch.split(rows, size), *pieces, strict=False)


def _working_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


class _ConstrainedLogprobs(torch.autograd.Function):
    """Runs forward and backward in blocks of rows; the backward recomputes the softmax instead of keeping it.

    d log pi_mp(a) / d z_k = (1[k = a] - pi_mp(k)) / tau for a in S. A row whose token is outside has gradient zero: its
    log-prob is a placeholder, and its sequence is dropped.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_ids: Tensor, threshold: Tensor, temperature: Tensor) -> Constrained:
        blocks = split_rows(rows, token_ids, threshold, temperature)
        parts = [constrain(block, *rule).read(ids) for block, ids, *rule in blocks]
        out = Constrained(*(torch.cat(part) for part in zip(*parts, strict=True)))
        ctx.save_for_backward(rows, token_ids, threshold, temperature, out.inside.unsqueeze(-1))
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor, None, None, None]:
        rows, token_ids, threshold, temperature, inside = ctx.saved_tensors
        gradient, slopes = torch.empty_like(rows), upstream.unsqueeze(-1) / temperature
        blocks = split_rows(rows, gradient, slopes, token_ids, inside, threshold, temperature)
        for block, target, slope, ids, member, *rule in blocks:
            target.copy_(logit_gradient(constrain(block, *rule), ids, slope, member))
        return gradient, None, None, None
