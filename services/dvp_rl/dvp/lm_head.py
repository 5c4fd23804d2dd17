"""LM head and constrained policy in one: log-probs from hidden states, without [tokens, vocabulary] in memory.

With G[i, k] = d log pi_mp(a_i) / d z_ik = (1[k = a_i] - pi_mp(k)) / tau on S_i, and exactly 0 off S_i,

    d / d hidden = diag(upstream) G W        d / d W = (diag(upstream) G)^T hidden

Where S is small, G is sparse: |S| entries per row instead of the vocabulary. Logits are computed tile by tile, so W is
read once for many rows. One walk over the vocabulary finds the largest logit of each row and all candidates for S. The
members of S among them suffice for the backward, which takes two sparse products per tile. A row that keeps more than
about `max_share` of the vocabulary is dense: once its largest logit is known, a second walk sums over S, and the
backward recomputes its tiles. It multiplies nothing for rows without a gradient (vetoed, rejected, outside).

Shapes: r rows of a block, c columns of a tile, k entries of the sparse matrix.
"""

from __future__ import annotations

import logging
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .policy import Constrained, Setting, as_rows, constrain, membership, split_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from jaxtyping import Bool, Float, Int

logger = logging.getLogger(__name__)

MAX_SHARE, MAX_SHARE_KERNELS = (0.1, 0.03), (0.07, 0.01)
"""Kept share of the vocabulary above which a row is dense, in float32 and in half precision, which speeds up only dense
products: the point where both ways take about equally long, as `python -m tests.benchmarks.lm_head --crossing` finds
it on a CPU and, for the kernels, on an H100 or H200, whichever is lower, because a list takes memory."""
CPU_CHUNK, DEVICE_CHUNK, KERNEL_CHUNK = 2**21, 2**27, 2**28
"""Logits per tile: 8 MiB of float32 on a CPU, 512 MiB on a device; 512 MiB of bfloat16 in the kernels, and half of it
in their backward."""
GROUP = 16
"""Number of logits that share one comparison in the search for S."""
CROWDED = 2
"""The search counts candidates before it lists them if more than 1 in this many groups holds one."""


def head_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None,
    token_ids: Int[Tensor, " tokens"],
    *,
    log_min_p: Setting,
    temperature: Setting,
    max_share: float | None = None,
    chunk: int | None = None,
    kernels: bool = True,
) -> Constrained:
    """`constrained_logprobs(hidden @ weight.T + bias, ...)`, differentiable (once) in hidden, weight and bias.

    Logits have the dtype of `hidden`, as under autocast; a float32 weight gets a float32 gradient. Memory: a few times
    `chunk` logits, and 8 bytes for every kept logit of a sparse row. On a CUDA device it runs in Triton kernels
    (lm_head_cuda.py), which need `weight` in the dtype of `hidden` as well, unless `kernels` is False or they do not
    work here. Those also hold 8 bytes for chunk / 16 logits until the backward, or for all that a block may keep.
    """
    half = hidden.dtype not in (torch.float32, torch.float64)
    function = kernels_on(hidden.device, hidden.dtype) if kernels and hidden.device.type == "cuda" else None
    if max_share is None:
        max_share = (MAX_SHARE if function is None else MAX_SHARE_KERNELS)[half]
    if chunk is None:
        chunk = KERNEL_CHUNK if function else CPU_CHUNK if hidden.device.type == "cpu" else DEVICE_CHUNK
    _, threshold, tau = as_rows(hidden, log_min_p, temperature)
    rules = (_column(setting, hidden) for setting in (threshold, tau))
    outputs = (function or _HeadLogprobs).apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, token_ids.unsqueeze(-1), *rules, max_share, chunk, torch.is_grad_enabled()
    )
    return Constrained(*outputs)


def _column(setting: Tensor, hidden: Tensor) -> Float[Tensor, "tokens 1"]:
    """The setting of each row, on the device of `hidden`. A scalar on the host gets there without a wait."""
    if setting.dim() == 0 and setting.device.type == "cpu":
        return hidden.new_full((len(hidden), 1), setting.item(), dtype=setting.dtype)
    return setting.to(hidden.device).expand(len(hidden), 1)


@cache
def kernels_on(device: torch.device, dtype: torch.dtype) -> type[torch.autograd.Function] | None:
    """The same function in Triton kernels; None, with a warning, where a trial of them fails: without Triton, which
    PyTorch brings along for CUDA on Linux, or without what Triton needs to compile."""
    try:
        with ThreadPoolExecutor(1) as fresh:  # free of the caller's gradient mode, autocast and hooks
            return fresh.submit(_try_kernels, device, dtype).result()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a compiler or driver raises, the other way works
        logger.warning(
            "the LM head runs without its Triton kernels, and slower: %s: %s (Triton needs a C compiler, and a folder "
            "TRITON_CACHE_DIR in which files may be executed)",
            type(error).__name__,
            str(error).strip().partition("\n")[0],
        )
        return None


def _try_kernels(device: torch.device, dtype: torch.dtype) -> type[torch.autograd.Function]:
    from .lm_head_cuda import KernelHeadLogprobs

    hidden, weight = (torch.zeros(n, 16, dtype=dtype, device=device, requires_grad=True) for n in (2, 32))
    token_ids = torch.zeros(2, 1, dtype=torch.long, device=device)
    setting = torch.zeros(2, 1, dtype=torch.promote_types(dtype, torch.float32), device=device)
    for max_share in (0.0, 1.0):
        outputs = KernelHeadLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, None, token_ids, setting, setting + 1, max_share, 1024, True
        )
        outputs[0].sum().backward()
        outputs[0].tolist()  # waits for the device
    return KernelHeadLogprobs


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        threshold: Tensor,
        tau: Tensor,
        max_share: float,
        chunk: int,
        recording: bool,
    ) -> Constrained:
        low, high = (int(end) for end in token_ids.aminmax()) if len(token_ids) else (0, 0)
        if low < 0 or high >= len(weight):
            raise IndexError(f"token ids from {low} to {high}, in a vocabulary of {len(weight)}")
        # needs_input_grad ignores the gradient mode, hence `recording`.
        learning = recording and any(ctx.needs_input_grad[:3])
        ctx.size = max(1, math.isqrt(chunk), chunk // len(weight))
        ctx.chunk, ctx.kept, ctx.logits, parts = chunk, [], None, []
        for states, *columns in split_rows(hidden, token_ids, threshold, tau, size=ctx.size):
            logits = _Logits(states, weight, bias, chunk)
            policy, kept = _constrain(logits, _Rows(*columns), max_share)
            parts.append(policy)
            if learning:
                ctx.kept.append(kept)
        out = Constrained(*(torch.cat(part) for part in zip(*parts, strict=True)))
        ctx.save_for_backward(hidden, weight, bias, token_ids, threshold, tau, out.inside)
        if learning and len(parts) == 1 and kept.dense.any():
            # Keeping them takes no more memory than computing them did.
            ctx.logits = logits.whole
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *columns, inside = ctx.saved_tensors
        slope = upstream.unsqueeze(-1) / columns[-1]
        active = inside & (upstream != 0)
        total = _HeadGradient(hidden, weight, bias)
        blocks = split_rows(hidden, total.hidden, active, slope, *columns, size=ctx.size)
        whole, ctx.logits = ctx.logits, None  # gradients overwrite them
        for kept, (states, target, alive, pull, *rest) in zip(ctx.kept, blocks, strict=True):
            logits, rows = _Logits(states, weight, bias, ctx.chunk, whole), _Rows(*rest)
            for kind, gradients in ((~kept.dense, _sparse_gradients), (kept.dense, _dense_gradients)):
                chosen = alive & kind
                if chosen.any():
                    target[chosen] = total.add(states[chosen], gradients(logits, rows, kept, pull, chosen))
        return total.hidden, total.weight, total.bias, *(None,) * 6


class _Rows(NamedTuple):
    """Token and settings of each row of a block."""

    token_ids: Int[Tensor, "r 1"]
    threshold: Float[Tensor, "r 1"]
    tau: Float[Tensor, "r 1"]


class _Logits:
    """The logits of a block in the dtype of its hidden states, tile by tile; each tile overwrites the previous one."""

    def __init__(
        self, states: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, whole: Tensor | None = None
    ) -> None:
        self._states, self._weight, self._bias = states, weight, bias
        self.whole = whole
        """All logits, once computed, if they fit in one tile."""
        vocab = len(weight)
        width = min(vocab, max(GROUP, chunk // max(len(states), 1) // GROUP * GROUP))
        self.slices = [slice(start, min(start + width, vocab)) for start in range(0, vocab, width)]
        """Columns of each tile."""
        self._buffer = states.new_empty(len(states) * width if whole is None else 0)

    def tiles(self, chosen: Tensor | None = None) -> Iterator[tuple[slice, Float[Tensor, "r c"]]]:
        """Columns and logits of each tile, for all rows or for the chosen ones."""
        if chosen is not None and chosen.all():
            chosen = None  # avoids a copy
        if self.whole is not None:
            yield self.slices[0], self.whole if chosen is None else self.whole[chosen]
            return
        states = self._states if chosen is None else self._states[chosen]
        for columns in self.slices:
            tile = self._tile(states, columns)
            if len(self.slices) == 1 and chosen is None:
                self.whole = tile
            yield columns, tile

    def _tile(self, states: Tensor, columns: slice) -> Tensor:
        head = self._weight[columns].to(states.dtype)
        out = self._buffer[: len(states) * len(head)].view(len(states), len(head))
        if self._bias is None:
            return torch.mm(states, head.T, out=out)
        return torch.addmm(self._bias[columns].to(states.dtype), states, head.T, out=out)


class _Found(NamedTuple):
    """Logits of a tile that may belong to S, in row order."""

    row: Int[Tensor, " k"]
    column: Int[Tensor, " k"]
    value: Float[Tensor, " k"]


class _Entries(NamedTuple):
    """Members of S in a tile, in row order."""

    number: Int[Tensor, " r"]
    column: Int[Tensor, " k"]
    weight: Float[Tensor, " k"]
    """exp((z - peak) / tau)"""


class _Kept(NamedTuple):
    """State of a block that the backward needs."""

    peak: Float[Tensor, "r 1"]
    """Largest logit; NaN in a row that is not finite."""
    kept: Float[Tensor, "r 1"]
    """Sum of exp((z - peak) / tau) over S."""
    dense: Bool[Tensor, " r"]
    entries: list[_Entries]
    """Entries by tile, without those of dense rows."""


class _Walk:
    """State of the first walk over the vocabulary."""

    def __init__(self, rows: _Rows, max_share: float, vocab: int) -> None:
        self._rows, self._share, self._vocab = rows, max_share, vocab
        # The lowest finite number instead of -inf, because -inf - -inf is NaN.
        self.peak = torch.full_like(rows.tau, torch.finfo(rows.tau.dtype).min)
        self.total = torch.zeros_like(self.peak)
        """Sum of exp((z - peak) / tau) over the vocabulary; the second walk replaces it for dense rows."""
        self.own = torch.zeros_like(self.peak)
        """Logit of the row's token."""
        self.found: list[_Found] = []
        """Candidates for S by tile; incomplete for dense rows."""
        self.dense = torch.zeros_like(self.peak[:, 0], dtype=torch.bool)
        self._number = torch.zeros_like(rows.token_ids[:, 0])
        """Number of candidates found per row."""

    def add(self, columns: slice, tile: Tensor) -> None:
        token_ids, _, tau = self._rows
        logits = tile.to(tau.dtype)
        width = logits.shape[1]
        lanes = GROUP if width % GROUP == 0 else 1
        groups = logits.view(len(logits), lanes, width // lanes)
        tops = groups.amax(1)
        before, self.peak = self.peak, torch.maximum(self.peak, tops.amax(-1, keepdim=True))
        hits = tops - self.peak >= self._rows.threshold
        if hits.sum() * CROWDED > hits.numel():  # counting so many is cheaper than listing them
            self._judge(columns.stop, self._number + self._count(logits))
        self.found.append(self._find(groups, hits & ~self.dense[:, None]))
        self._judge(columns.stop, self._number)
        if not self.dense.all():
            self.total *= ((before - self.peak) / tau).exp_()
            for piece, peak, temperature, total in split_rows(logits, self.peak, tau, self.total):
                total += (piece - peak).div_(temperature).exp_().sum(-1, keepdim=True)
        place = token_ids - columns.start
        own = logits.gather(1, place.clamp(0, width - 1))
        self.own = torch.where((place >= 0) & (place < width), own, self.own)

    def _count(self, logits: Tensor) -> Tensor:
        """Number of candidates that `_find` would find in each row."""
        pieces = split_rows(logits, self.peak, self._rows.threshold)
        return torch.cat([membership(piece - peak, threshold).sum(-1) for piece, peak, threshold in pieces])

    def _find(self, groups: Tensor, hits: Tensor) -> _Found:
        """Compares as `constrain` does, but with the peak so far; the peak only grows, so no member of S is missed."""
        row, place = hits.nonzero(as_tuple=True)
        some = groups[row, :, place]
        item, lane = (some - self.peak[row] >= self._rows.threshold[row]).nonzero(as_tuple=True)
        row, place = row[item], place[item]
        self._number += row.bincount(minlength=len(self.dense))
        return _Found(row.int(), (lane * groups.shape[2] + place).int(), some[item, lane])

    def _judge(self, seen: int, number: Tensor) -> None:
        """Marks a row as dense once it has more candidates than `max_share` of the columns seen, or of half the
        vocabulary if fewer were seen: half is enough to tell, and as much as is worth keeping."""
        self.dense |= number > self._share * max(seen, self._vocab / 2)


def _constrain(logits: _Logits, rows: _Rows, max_share: float) -> tuple[Constrained, _Kept]:
    """Runs both walks over the vocabulary."""
    walk = _Walk(rows, max_share, logits.slices[-1].stop)
    for columns, tile in logits.tiles():
        walk.add(columns, tile)
    limits, dense = torch.finfo(walk.peak.dtype), walk.dense
    peak = walk.peak.masked_fill((walk.peak == limits.min) | walk.peak.isinf(), math.nan)
    count, kept = torch.zeros_like(rows.token_ids[:, 0]), torch.zeros_like(peak[:, 0], dtype=torch.float64)
    entries = []
    while walk.found:  # frees candidates while adding entries, to avoid twice the memory
        row, column, value = walk.found.pop(0)
        block = constrain(value[:, None], rows.threshold[row], rows.tau[row], peak[row])
        mine = block.keep[:, 0].bool() & ~dense[row]
        row, weight = row[mine], block.weight[mine, 0]
        entries.append(_Entries(row.bincount(minlength=len(peak)), column[mine], weight))
        kept.index_add_(0, row, weight.double())
        count += entries[-1].number
    if dense.any():
        sums = [count[dense], kept[dense], torch.zeros_like(walk.total[dense])]
        known = [column[dense] for column in (rows.threshold, rows.tau, peak)]
        for _, tile in logits.tiles(dense):
            for piece, number, mass, total, *rule in split_rows(tile, *sums, *known):
                block = constrain(piece, *rule)
                number += block.keep.sum(-1).long()
                mass += block.kept[:, 0]
                total += block.total
        count[dense], kept[dense], walk.total[dense] = sums
    weight = kept[:, None].to(peak.dtype) + (peak - peak)  # NaN where the peak is
    own = constrain(walk.own, rows.threshold, rows.tau, peak)._replace(kept=weight, total=walk.total)
    policy = own.read(torch.zeros_like(rows.token_ids))._replace(kept_count=count.int())
    return policy, _Kept(peak, weight, dense, entries)


def _sparse_gradients(
    logits: _Logits, rows: _Rows, kept: _Kept, slope: Tensor, chosen: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """slope * G of the chosen rows by tile, as sparse matrices."""
    share = slope / kept.kept
    index = torch.arange(len(chosen), device=chosen.device)
    for columns, (number, column, weight) in zip(logits.slices, kept.entries, strict=True):
        row = index.repeat_interleave(number)
        if not chosen.all():
            mine = chosen[row]
            row, column, weight = row[mine], column[mine], weight[mine]
        hit = column + columns.start == rows.token_ids[row, 0]
        values = hit * slope[row, 0] - weight * share[row, 0]
        yield columns, _csr(number[chosen], column, values, columns.stop - columns.start)


def _dense_gradients(
    logits: _Logits, rows: _Rows, kept: _Kept, slope: Tensor, chosen: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """slope * G of the chosen rows by tile, as dense matrices in the dtype of the logits."""
    slope, share = slope[chosen], slope[chosen] / kept.kept[chosen]
    token_ids, *known = (column[chosen] for column in (*rows, kept.peak))
    for columns, tile in logits.tiles(chosen):
        for piece, pull, *rule in split_rows(tile, share, *known):
            torch.mul(constrain(piece, *rule).weight, -pull, out=piece)
        row = ((token_ids >= columns.start) & (token_ids < columns.stop)).nonzero()[:, 0]
        tile[row, token_ids[row, 0] - columns.start] += slope[row, 0]
        yield columns, tile


class _HeadGradient:
    """Gradients summed over rows; `weight` and `bias` are None if they need no gradient."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._head = weight
        self.hidden = torch.zeros_like(hidden)
        self.weight = torch.zeros_like(weight) if weight.requires_grad else None
        self.bias = torch.zeros_like(bias) if bias is not None and bias.requires_grad else None

    def add(self, states: Tensor, gradients: Iterable[tuple[slice, Tensor]]) -> Tensor:
        """Adds some rows, given the gradient of their logits by tile. Returns the gradient of their hidden states."""
        pull = torch.zeros_like(states, dtype=torch.promote_types(states.dtype, torch.float32))
        for columns, matrix in gradients:
            _accumulate(pull, matrix, self._head[columns])
            if self.weight is not None:
                _accumulate(self.weight[columns], matrix.t(), states)
            if self.bias is not None:
                _accumulate(self.bias[columns, None], matrix.t(), torch.ones_like(states[:, :1]))
        return pull.to(states.dtype)


def _accumulate(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left @ right in the dtype of `left`."""
    if into.dtype is left.dtype:
        into.addmm_(left, right.to(left.dtype))
    else:
        into += left @ right.to(left.dtype)


def _csr(count: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    starts = torch.cat([count.new_zeros(1), count.cumsum(0)]).int()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)  # in beta, and unchecked as asked for
        return torch.sparse_csr_tensor(starts, columns, values, (len(count), width), check_invariants=False)
