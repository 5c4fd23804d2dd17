"""`head_logprobs` on a GPU, with Triton kernels that touch each logit as seldom as they can.

Forward: blocks of rows, so that all logits of a row are in memory at once. They are read once for the largest logit of
each piece; counting and listing S then read only the pieces that hold members. The host learns how many members a block
has while the device is busy with the next one. Backward: of the rows that keep little, only these members, gathered by
row for the hidden states and by column for the weight; of the others, tiles of columns computed again, with the
gradient written over the logits. No kernel adds atomically, so results repeat bit for bit.

Shapes: N rows, r rows of a block, K members of S of all sparse rows, V tokens, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .policy import Constrained, constrain, split_rows

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jaxtyping import Bool, Float, Int

PIECES, PIECE = 8, 512
"""Pieces of a row in which one program finds the largest logits, and logits of a piece."""
GROUP = 32
"""Pieces of a row in which one program looks for members of S."""
ROWS = 256
"""A block with more rows has a multiple of so many, which is whole tiles of a matrix product."""
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
        ctx.chunk, ctx.dtypes = chunk, (weight.dtype, None if bias is None else bias.dtype)
        ctx.any_dense, parts, members = False, [], []
        with _device_of(hidden):
            blocks = _scan_blocks(hidden, head, bias, token_ids, threshold, tau, room, chunk)
            for block, _ in pairwise(chain(blocks, (None,))):  # the device has the next one to compute meanwhile
                assert block is not None
                num_members, num_dense = block.found()
                ctx.any_dense |= num_dense > 0
                parts.append(block.sums)
                members.append((block.number, *block.members(num_members)))
            sums = _Sums(*(torch.cat(part) for part in zip(*parts, strict=True)))
            out = sums.read(threshold, tau)
        if learning:
            stored = [torch.cat(part) for part in zip(*members, strict=True)]
            ctx.save_for_backward(
                hidden, head, bias, token_ids, threshold, tau, out.inside, sums.peak, sums.kept, *stored
            )
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
            if ctx.any_dense:
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

    own: Float[Tensor, "r 1"]
    """Logit of the row's token."""
    peak: Float[Tensor, "r 1"]
    """Largest logit; NaN in a row that is not finite."""
    kept: Float[Tensor, "r 1"]
    """Sum of exp((z - peak) / tau) over S."""
    total: Float[Tensor, "r 1"]
    """The same over the vocabulary."""
    size: Int[Tensor, " r"]
    """Number of members of S."""

    def read(self, threshold: Tensor, tau: Tensor) -> Constrained:
        """The results for the token of each row."""
        total = torch.maximum(self.total, self.kept)  # the same terms in another order may sum to less
        block = constrain(self.own, threshold, tau, self.peak)._replace(kept=self.kept, total=total)
        return block.read(torch.zeros_like(self.size[:, None], dtype=torch.long))._replace(kept_count=self.size)


class _Block(NamedTuple):
    """Rows whose members of S are counted, not listed."""

    logits: Float[Tensor, "r V"]
    threshold: Float[Tensor, "r 1"]
    tau: Float[Tensor, "r 1"]
    tops: Float[Tensor, "r pieces"]
    """Largest logit of each piece."""
    sums: _Sums
    number: Int[Tensor, " r"]
    """Members of each sparse row; -1 in a dense row, of which none are listed."""
    counts: Int[Tensor, "r groups"]
    """Those of each group of pieces; 0 in a dense row."""
    ends: Int[Tensor, " r*groups"]
    """Running sum of `counts`."""
    found: Callable[[], list[int]]
    """Waits for the number of members and of dense rows."""

    def members(self, found: int) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
        """Columns of the members of S of the sparse rows, and exp((z - peak) / tau) there."""
        column, weight = self.counts.new_empty(found), self.tau.new_empty(found)
        if found:
            _list_kernel[(self.counts.numel(),)](
                *(self.logits, self.threshold, self.tau, self.sums.peak, self.tops, self.counts, self.ends),
                *(column, weight, self.logits.shape[1], self.tops.shape[1], self.counts.shape[1]),
                PIECE=PIECE,
                GROUP=GROUP,
                num_warps=1,
            )
        return column, weight


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device. The interpreter's tensors are on none."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _product(states: Tensor, head: Tensor, bias: Tensor | None, buffer: Tensor) -> Float[Tensor, "r c"]:
    """Logits, in the buffer."""
    out = buffer[: len(states) * len(head)].view(len(states), len(head))
    if bias is None:
        return torch.mm(states, head.T, out=out)
    return torch.addmm(bias.to(states.dtype), states, head.T, out=out)


def _scan_blocks(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    threshold: Tensor,
    tau: Tensor,
    room: int,
    chunk: int,
) -> Iterator[_Block]:
    """Computes and scans block after block. The one after the next overwrites a block's logits. A row is dense if it
    keeps more than `room` tokens; 0: all are."""
    vocab = len(head)
    size = max(1, chunk // 2 // vocab)
    size -= size % ROWS if size > ROWS else 0
    buffers = [hidden.new_empty(min(size, len(hidden)) * vocab) for _ in range(2 if size < len(hidden) else 1)]
    for number, (states, ids, limit, scale) in enumerate(split_rows(hidden, token_ids, threshold, tau, size=size)):
        logits = _product(states, head, bias, buffers[number % 2])
        yield _scan(logits, ids, limit.contiguous(), scale.contiguous(), room)


def _scan(logits: Float[Tensor, "r V"], ids: Tensor, threshold: Tensor, tau: Tensor, room: int) -> _Block:
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    groups = triton.cdiv(pieces, GROUP)
    tops, piece_masses, masses = (tau.new_empty(rows, number) for number in (pieces, pieces, groups))
    counts = torch.empty(rows, groups, dtype=torch.int32, device=logits.device)
    peak, total = torch.empty_like(tau), torch.empty_like(tau)
    if rows:
        _tops_kernel[(rows, triton.cdiv(pieces, PIECES))](
            logits, tau, tops, piece_masses, vocab, pieces, PIECES=PIECES, PIECE=PIECE
        )
        _peak_kernel[(rows,)](tops, piece_masses, tau, peak, total, pieces, ALL=triton.next_power_of_2(pieces))
        _count_kernel[(counts.numel(),)](
            *(logits, threshold, tau, peak, tops, counts, masses, vocab, pieces, groups),
            PIECE=PIECE,
            GROUP=GROUP,
            num_warps=1,
        )
    size = counts.sum(-1, dtype=torch.int32)
    kept = masses.sum(-1, keepdim=True) + (peak - peak)
    sums, dense = _Sums(logits.gather(1, ids), peak, kept, total, size), size > room
    counts.masked_fill_(dense[:, None], 0)
    ends = counts.flatten().cumsum(0)
    found = _fetch(torch.stack((ends[-1], dense.sum()))) if rows and room else lambda: [0, rows]
    return _Block(logits, threshold, tau, tops, sums, size.masked_fill(dense, -1), counts, ends, found)


def _fetch(values: Int[Tensor, " n"]) -> Callable[[], list[int]]:
    """Starts to copy to the host; the result waits until the copy is there, not until the device is idle."""
    if not values.is_cuda:
        return values.tolist
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.copy_(values, non_blocking=True)
    done.record()

    def wait() -> list[int]:
        done.synchronize()
        found: list[int] = there.tolist()
        return found

    return wait


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
    """Adds the gradient of the rows `index`, whose members of S are known. Nothing here waits for the device."""
    if not len(column):
        return
    row = index.repeat_interleave(number, output_size=len(column))
    hit = column == rows.token_ids[row, 0]
    value = hit * rows.slope[row, 0] - weight * rows.share[row, 0]
    _gather(value, column, head, total.hidden, index, number.cumsum(0), number.where(alive[index], 0))
    if total.weight is None and total.bias is None:
        return
    # Members of rows without a gradient go behind the vocabulary.
    column, order = column.masked_fill(~alive[row], len(head)).sort(stable=True)
    row, value = row[order], value[order]
    tokens = torch.arange(len(head), dtype=column.dtype, device=column.device)
    ends = torch.searchsorted(column, tokens, right=True)
    lengths = ends.diff(prepend=ends.new_zeros(1))
    if total.weight is not None:
        _gather(value, row, hidden, total.weight, tokens, ends, lengths)
    if total.bias is not None:
        ones = hidden.new_ones(len(hidden), 1)
        _gather(value, row, ones, total.bias[:, None], tokens, ends, lengths)


def _gather(
    value: Tensor, index: Tensor, source: Tensor, into: Tensor, places: Tensor, ends: Tensor, lengths: Tensor
) -> None:
    """into[places[i]] += sum over the `lengths[i]` entries before `ends[i]` of value * source[index]."""
    width = source.shape[1]
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
    logits, tau, tops, masses, vocab, pieces, PIECES: tl.constexpr, PIECE: tl.constexpr
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
    tl.store(tops + row * pieces + piece, top, piece < pieces)
    tl.store(masses + row * pieces + piece, tl.sum(mass, 1), piece < pieces)


@triton.jit  # type: ignore[untyped-decorator]
def _peak_kernel(tops, masses, tau, peak, total, pieces, ALL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest logit of each row, NaN if the row is not finite, and the sum of exp((z - largest) / tau) over it."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, ALL)
    top = tl.load(tops + row * pieces + piece, piece < pieces, float("-inf"))
    mass = tl.load(masses + row * pieces + piece, piece < pieces, 0.0)
    largest = tl.max(top, 0)
    all_mass = tl.sum(mass * tl.exp((top - largest) / tl.load(tau + row)), 0)
    tl.store(peak + row, largest + (all_mass - all_mass))
    tl.store(total + row, all_mass)


@triton.jit  # type: ignore[untyped-decorator]
def _count_kernel(  # type: ignore[no-untyped-def]
    logits, threshold, tau, peak, tops, counts, masses, vocab, pieces, groups, PIECE: tl.constexpr, GROUP: tl.constexpr
):
    """Number of members of S in a group, and their sum of exp((z - peak) / tau). Reads only pieces that have any."""
    own = tl.program_id(0)
    row, first = (own // groups).to(tl.int64), own % groups * GROUP
    limit, scale, largest = tl.load(threshold + row), tl.load(tau + row), tl.load(peak + row)
    count, mass = own * 0, scale * 0
    every = first + tl.arange(0, GROUP)
    if tl.max(tl.load(tops + row * pieces + every, every < pieces, float("-inf")), 0) - largest >= limit:
        for piece in range(first, tl.minimum(first + GROUP, pieces)):
            if tl.load(tops + row * pieces + piece) - largest >= limit:
                columns = piece * PIECE + tl.arange(0, PIECE)
                z = tl.load(logits + row * vocab + columns, columns < vocab, float("-inf")).to(scale.dtype)
                member = (z - largest >= limit) & (columns < vocab)
                count += tl.sum(member.to(tl.int32), 0)
                mass += tl.sum(tl.where(member, tl.exp((z - largest) / scale), 0.0), 0)
    tl.store(counts + own, count)
    tl.store(masses + own, mass)


@triton.jit  # type: ignore[untyped-decorator]
def _list_kernel(  # type: ignore[no-untyped-def]
    logits,
    threshold,
    tau,
    peak,
    tops,
    counts,
    ends,
    column,
    weight,
    vocab,
    pieces,
    groups,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Writes the members of S of a group down, before its end. Reads only pieces that have any."""
    own = tl.program_id(0)
    count = tl.load(counts + own)
    if count > 0:
        row, first = (own // groups).to(tl.int64), own % groups * GROUP
        limit, scale, largest = tl.load(threshold + row), tl.load(tau + row), tl.load(peak + row)
        place = tl.load(ends + own) - count
        for piece in range(first, tl.minimum(first + GROUP, pieces)):
            if tl.load(tops + row * pieces + piece) - largest >= limit:
                columns = piece * PIECE + tl.arange(0, PIECE)
                z = tl.load(logits + row * vocab + columns, columns < vocab, float("-inf")).to(scale.dtype)
                member = (z - largest >= limit) & (columns < vocab)
                # One after the other: there are few, and a running sum over the piece takes far more registers.
                found = tl.min(tl.where(member, columns, vocab), 0)
                while found < vocab:
                    shifted = tl.load(logits + row * vocab + found).to(scale.dtype) - largest
                    tl.store(column + place, found)
                    tl.store(weight + place, tl.exp(shifted / scale))
                    place += 1
                    found = tl.min(tl.where(member & (columns > found), columns, vocab), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    value, index, source, into, places, ends, lengths, width, ENTRIES: tl.constexpr, HIDDEN: tl.constexpr
):
    run = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * HIDDEN + tl.arange(0, HIDDEN)
    inside = columns < width
    length = tl.load(lengths + run)
    if length > 0:
        end = tl.load(ends + run)
        total = tl.zeros([HIDDEN], value.dtype.element_ty)
        for start in range(end - length, end, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            there = entry < end
            share = tl.load(value + entry, there, 0.0)
            row = tl.load(index + entry, there, 0).to(tl.int64)
            part = tl.load(source + row[:, None] * width + columns[None, :], there[:, None] & inside[None, :], 0.0)
            total += tl.sum(share[:, None] * part.to(share.dtype), 0)
        target = into + tl.load(places + run).to(tl.int64) * width + columns
        tl.store(target, tl.load(target, inside, 0.0) + total, inside)


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
