"""`head_logprobs` on a GPU, with Triton kernels that touch each logit as seldom as they can.

Forward: blocks of rows, so that all logits of a row are in memory at once. They are read once for the largest logit of
each piece; counting and listing S then read only the pieces that hold members. Backward: of the rows that keep little,
only these members, gathered by row for the hidden states and by column for the weight; of the others, tiles of columns
computed again, with the gradient written over the logits. No kernel adds atomically, so results repeat bit for bit.

Shapes: N rows, r rows of a block, K members of S of all sparse rows, V tokens, H hidden.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .policy import Constrained, constrain, split_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from jaxtyping import Bool, Float, Int

PIECES, PIECE = 8, 512
"""Pieces of a row in which one program finds the largest logits, and logits of a piece."""
ENTRIES, HIDDEN = 8, 1024
"""Members of S, and numbers of each of their rows, that one program gathers at a time."""
COLUMNS = 1024
"""Logits that one program turns into gradients."""
TILE, MEMBERS = 2, 16
"""The backward computes 1/TILE of a chunk's logits, and adds 1/MEMBERS of as many members of S, at a time: the products
with a tile, and the sorted copies of the members, need memory as well."""


class KernelHeadLogprobs(torch.autograd.Function):
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
        learning = recording and any(ctx.needs_input_grad[:3])
        head, vocab = weight.to(hidden.dtype), len(weight)
        room = max(1, math.ceil(max_share * vocab)) if learning else 0
        size, parts, found = max(1, chunk // vocab), [], []
        buffer = hidden.new_empty(min(size, len(hidden)) * vocab)
        with _device_of(hidden):
            for states, ids, limit, scale in split_rows(hidden, token_ids, threshold, tau, size=size):
                logits = _product(states, head, bias, buffer)
                sums, members = _scan(logits, limit, scale, room)
                parts.append(sums.read(logits.gather(1, ids), limit, scale))
                found.append((sums.peak, sums.kept, *members))
        out = Constrained(*(torch.cat(part) for part in zip(*parts, strict=True)))
        ctx.chunk, ctx.dtypes = chunk, (weight.dtype, None if bias is None else bias.dtype)
        if learning:
            stored = [torch.cat(part) for part in zip(*found, strict=True)]
            ctx.save_for_backward(hidden, head, bias, token_ids, threshold, tau, out.inside, *stored)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, head, bias, token_ids, threshold, tau, inside, peak, kept, number, column, weight = ctx.saved_tensors
        slope = upstream.unsqueeze(-1) / tau
        rows = _Rows(token_ids, threshold, tau, peak, slope, slope / kept)
        alive, dense = inside & (upstream != 0), number < 0
        of_weight, of_bias = (
            like.new_zeros(like.shape, dtype=dtype) if like is not None and needed else None
            for like, dtype, needed in zip((head, bias), ctx.dtypes, ctx.needs_input_grad[1:3], strict=True)
        )
        total = _Gradients(hidden.new_zeros(hidden.shape), of_weight, of_bias)
        with _device_of(hidden):
            for part in _parts(number.clamp(min=0), column, weight, max(1, ctx.chunk // MEMBERS)):
                _add_sparse(total, hidden, head, rows, alive, *part)
            _add_dense(total, hidden, head, bias, rows, (alive & dense).nonzero()[:, 0], ctx.chunk // TILE)
        return *total, *(None,) * 6


class _Rows(NamedTuple):
    """Token, settings and results of each row."""

    token_ids: Int[Tensor, "N 1"]
    threshold: Float[Tensor, "N 1"]
    tau: Float[Tensor, "N 1"]
    peak: Float[Tensor, "N 1"]
    slope: Float[Tensor, "N 1"]
    """Gradient of the loss by the row's log-prob, over tau."""
    share: Float[Tensor, "N 1"]
    """slope over the sum of exp((z - peak) / tau) over S."""


class _Gradients(NamedTuple):
    """Sums over rows, each contiguous."""

    hidden: Float[Tensor, "N H"]
    weight: Float[Tensor, "V H"] | None
    bias: Float[Tensor, " V"] | None


class _Sums(NamedTuple):
    """What the scan of a block found."""

    peak: Float[Tensor, "r 1"]
    """Largest logit; NaN in a row that is not finite."""
    kept: Float[Tensor, "r 1"]
    """Sum of exp((z - peak) / tau) over S."""
    total: Float[Tensor, "r 1"]
    """The same over the vocabulary."""
    size: Int[Tensor, " r"]
    """Number of members of S."""

    def read(self, own: Float[Tensor, "r 1"], threshold: Tensor, tau: Tensor) -> Constrained:
        """The results for the token of each row, whose logit is `own`."""
        total = torch.maximum(self.total, self.kept)  # the same terms in another order may sum to less
        block = constrain(own, threshold, tau, self.peak)._replace(kept=self.kept, total=total)
        return block.read(torch.zeros_like(self.size[:, None], dtype=torch.long))._replace(kept_count=self.size)


class _Members(NamedTuple):
    """S of the sparse rows."""

    number: Int[Tensor, " r"]
    """Members of each row; -1 in a dense row, of which none are kept."""
    column: Int[Tensor, " K"]
    weight: Float[Tensor, " K"]
    """exp((z - peak) / tau)"""


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device. The interpreter's tensors are on none."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _product(states: Tensor, head: Tensor, bias: Tensor | None, buffer: Tensor) -> Float[Tensor, "r c"]:
    """Logits, in the buffer."""
    out = buffer[: len(states) * len(head)].view(len(states), len(head))
    if bias is None:
        return torch.mm(states, head.T, out=out)
    return torch.addmm(bias.to(states.dtype), states, head.T, out=out)


def _scan(logits: Float[Tensor, "r V"], threshold: Tensor, tau: Tensor, room: int) -> tuple[_Sums, _Members]:
    """Everything that a block's logits tell. A row is dense if it keeps more than `room` tokens; 0: all are."""
    rows, vocab = logits.shape
    threshold, tau = threshold.contiguous(), tau.contiguous()
    parts = triton.cdiv(vocab, PIECE)
    tops, masses = tau.new_empty(rows, parts), tau.new_empty(rows, parts)
    counts = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    peak, total = torch.empty_like(tau), torch.empty_like(tau)
    every = {"vocab": vocab, "parts": parts, "PIECE": PIECE}
    if rows:
        _tops_kernel[(rows, triton.cdiv(parts, PIECES))](logits, tau, tops, masses, PIECES=PIECES, **every)
        _peak_kernel[(rows,)](tops, masses, tau, peak, total, parts, PARTS=triton.next_power_of_2(parts))
        _count_kernel[(rows * parts,)](logits, threshold, tau, peak, tops, counts, masses, **every, num_warps=1)
    size, found = counts.sum(-1, dtype=torch.int32), 0
    sums, dense = _Sums(peak, masses.sum(-1, keepdim=True) + (peak - peak), total, size), size > room
    if rows and room:
        counts.masked_fill_(dense[:, None], 0)
        ends = counts.flatten().cumsum(0)
        found = int(ends[-1])
    column, weight = counts.new_empty(found), tau.new_empty(found)
    if found:
        _list_kernel[(rows * parts,)](logits, threshold, tau, peak, counts, ends, column, weight, **every, num_warps=1)
    return sums, _Members(size.masked_fill(dense, -1), column, weight)


def _parts(
    number: Int[Tensor, " N"], column: Int[Tensor, " K"], weight: Float[Tensor, " K"], limit: int
) -> Iterator[tuple[Int[Tensor, " n"], Int[Tensor, " n"], Int[Tensor, " k"], Float[Tensor, " k"]]]:
    """Stretches of rows with at most `limit` members, but at least one row: rows, number, column, weight."""
    index = torch.arange(len(number), device=number.device)
    if len(column) <= limit:
        yield index, number, column, weight
        return
    ends = number.cumsum(0)
    row = done = 0
    while row < len(number):
        stop = max(row + 1, int(torch.searchsorted(ends, done + limit, right=True)))
        end = int(ends[stop - 1])
        yield index[row:stop], number[row:stop], column[done:end], weight[done:end]
        row, done = stop, end


def _add_sparse(
    total: _Gradients,
    hidden: Tensor,
    head: Tensor,
    rows: _Rows,
    alive: Bool[Tensor, " N"],
    index: Int[Tensor, " n"],
    number: Int[Tensor, " n"],
    column: Int[Tensor, " k"],
    weight: Float[Tensor, " k"],
) -> None:
    """Adds the gradient of the rows `index`, whose members of S are known."""
    row = index.repeat_interleave(number, output_size=len(column))
    mine = alive[row]
    row, column, weight = row[mine], column[mine], weight[mine]
    if not len(column):
        return
    hit = column == rows.token_ids[row, 0]
    value = hit * rows.slope[row, 0] - weight * rows.share[row, 0]
    _gather(value, column, head, total.hidden, index, number.where(alive[index], 0))
    if total.weight is None and total.bias is None:
        return
    column, order = column.sort(stable=True)
    row, value = row[order], value[order]
    tokens, lengths = torch.unique_consecutive(column, return_counts=True)
    if total.weight is not None:
        _gather(value, row, hidden, total.weight, tokens, lengths)
    if total.bias is not None:
        ones = hidden.new_ones(len(hidden), 1)
        _gather(value, row, ones, total.bias[:, None], tokens, lengths)


def _gather(value: Tensor, index: Tensor, source: Tensor, into: Tensor, places: Tensor, lengths: Tensor) -> None:
    """into[places[i]] += sum over the i-th run of `lengths` of value * source[index]."""
    ends, width = lengths.cumsum(0), source.shape[1]
    piece = min(HIDDEN, triton.next_power_of_2(width))
    _gather_kernel[(len(places), triton.cdiv(width, piece))](
        *(value, index, source.contiguous(), into, places, ends, lengths, width), ENTRIES=ENTRIES, HIDDEN=piece
    )


def _add_dense(
    total: _Gradients,
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    rows: _Rows,
    chosen: Int[Tensor, " n"],
    chunk: int,
) -> None:
    """Adds the gradient of the chosen rows, in tiles of columns."""
    if not len(chosen):
        return
    states, vocab = hidden[chosen], len(head)
    own = _Rows(*(each[chosen] for each in rows))
    width = min(vocab, max(16, chunk // len(chosen) // 16 * 16))
    pull = torch.zeros_like(states, dtype=torch.promote_types(states.dtype, torch.float32))
    buffer = states.new_empty(len(states) * width)
    for start in range(0, vocab, width):
        columns = slice(start, min(start + width, vocab))
        tile = _product(states, head[columns], None if bias is None else bias[columns], buffer)
        _gradient_kernel[(len(tile), triton.cdiv(tile.shape[1], COLUMNS))](
            tile, *own, start, tile.shape[1], BLOCK=COLUMNS
        )
        pull += tile @ head[columns]
        if total.weight is not None:
            total.weight[columns] += tile.T @ states
        if total.bias is not None:
            total.bias[columns] += tile.sum(0, dtype=pull.dtype)
    total.hidden[chosen] = pull.to(states.dtype)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _tops_kernel(  # type: ignore[no-untyped-def]
    logits, tau, tops, masses, vocab, parts, PIECES: tl.constexpr, PIECE: tl.constexpr
):
    """Largest logit of each piece, and the sum of exp((z - largest) / tau) over it."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1) * PIECES + tl.arange(0, PIECES)
    columns = piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    scale = tl.load(tau + row)
    z = tl.load(logits + row * vocab + columns, columns < vocab, float("-inf")).to(scale.dtype)
    top = tl.max(z, 1)
    # A piece of -inf has mass 0; NaN and +inf make the mass NaN.
    mass = tl.exp((z - tl.where(top == float("-inf"), 0.0, top)[:, None]) / scale)
    tl.store(tops + row * parts + piece, top, piece < parts)
    tl.store(masses + row * parts + piece, tl.sum(mass, 1), piece < parts)


@triton.jit  # type: ignore[untyped-decorator]
def _peak_kernel(tops, masses, tau, peak, total, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest logit of each row, NaN if the row is not finite, and the sum of exp((z - largest) / tau) over it."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PARTS)
    top = tl.load(tops + row * parts + piece, piece < parts, float("-inf"))
    mass = tl.load(masses + row * parts + piece, piece < parts, 0.0)
    largest = tl.max(top, 0)
    all_mass = tl.sum(mass * tl.exp((top - largest) / tl.load(tau + row)), 0)
    tl.store(peak + row, largest + (all_mass - all_mass))
    tl.store(total + row, all_mass)


@triton.jit  # type: ignore[untyped-decorator]
def _count_kernel(  # type: ignore[no-untyped-def]
    logits, threshold, tau, peak, tops, counts, masses, vocab, parts, PIECE: tl.constexpr
):
    """Number of members of S in a piece, and their sum of exp((z - peak) / tau). Reads only pieces that have any."""
    own = tl.program_id(0)
    row, piece = (own // parts).to(tl.int64), own % parts
    limit, scale, largest = tl.load(threshold + row), tl.load(tau + row), tl.load(peak + row)
    count, mass = own * 0, scale * 0
    if tl.load(tops + own) - largest >= limit:
        columns = piece * PIECE + tl.arange(0, PIECE)
        z = tl.load(logits + row * vocab + columns, columns < vocab, float("-inf")).to(scale.dtype)
        member = (z - largest >= limit) & (columns < vocab)
        count = tl.sum(member.to(tl.int32), 0)
        mass = tl.sum(tl.where(member, tl.exp((z - largest) / scale), 0.0), 0)
    tl.store(counts + own, count)
    tl.store(masses + own, mass)


@triton.jit  # type: ignore[untyped-decorator]
def _list_kernel(  # type: ignore[no-untyped-def]
    logits, threshold, tau, peak, counts, ends, column, weight, vocab, parts, PIECE: tl.constexpr
):
    """Writes the members of S of a piece down, before its end. Reads only pieces whose count is not 0."""
    own = tl.program_id(0)
    count = tl.load(counts + own)
    if count > 0:
        row, piece = (own // parts).to(tl.int64), own % parts
        limit, scale, largest = tl.load(threshold + row), tl.load(tau + row), tl.load(peak + row)
        columns = piece * PIECE + tl.arange(0, PIECE)
        z = tl.load(logits + row * vocab + columns, columns < vocab, float("-inf")).to(scale.dtype)
        member = (z - largest >= limit) & (columns < vocab)
        place = tl.load(ends + own) - count + tl.cumsum(member.to(tl.int32), 0) - 1
        tl.store(column + place, columns, member)
        tl.store(weight + place, tl.exp((z - largest) / scale), member)


@triton.jit  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    value, index, source, into, places, ends, lengths, width, ENTRIES: tl.constexpr, HIDDEN: tl.constexpr
):
    run = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * HIDDEN + tl.arange(0, HIDDEN)
    inside = columns < width
    end = tl.load(ends + run)
    total = tl.zeros([HIDDEN], value.dtype.element_ty)
    for start in range(end - tl.load(lengths + run), end, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        there = entry < end
        share = tl.load(value + entry, there, 0.0)
        row = tl.load(index + entry, there, 0).to(tl.int64)
        part = tl.load(source + row[:, None] * width + columns[None, :], there[:, None] & inside[None, :], 0.0)
        total += tl.sum(share[:, None] * part.to(share.dtype), 0)
    into += tl.load(places + run).to(tl.int64) * width + columns
    tl.store(into, tl.load(into, inside, 0.0) + total, inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    tile, token_ids, threshold, tau, peak, slope, share, first, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < width
    tile += row * width + columns
    scale = tl.load(tau + row)
    shifted = tl.load(tile, there, float("-inf")).to(scale.dtype) - tl.load(peak + row)
    mass = tl.where(shifted >= tl.load(threshold + row), tl.exp(shifted / scale), 0.0)
    hit = columns + first == tl.load(token_ids + row)
    gradient = tl.where(hit, tl.load(slope + row), 0.0) - mass * tl.load(share + row)
    tl.store(tile, gradient, there)
