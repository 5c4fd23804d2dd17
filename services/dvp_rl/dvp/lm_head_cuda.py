"""`head_logprobs` on a GPU, with Triton kernels that touch each logit as seldom as they can.

Forward: blocks of rows, so that all logits of a row are in memory at once. They are read once for the largest logit of
each piece; counting and listing S then read only the pieces that hold members. The list has room for all members that
the rows of a part may have, so the host waits for nothing but the end of the part before. Backward: of the rows that
keep little, only these members, gathered by row for the hidden states and by column for the weight; of the others,
tiles of columns computed again, with the gradient written over the logits. No kernel adds atomically, so results repeat
bit for bit.

Shapes: N rows, n rows of a part, r rows of a block, k members of S of the sparse rows of a part, V tokens, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .policy import Constrained, constrain

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

PIECES, PIECE = 16, 256
"""Pieces of a row in which one program finds the largest logits, and logits of a piece."""
GROUP = 64
"""Pieces of a row in which one program looks for members of S."""
COUNTS = 2**14
"""Groups whose members one program adds up at a time."""
ROWS = 256
"""A block with more rows has a multiple of so many, which is whole tiles of a matrix product."""
ENTRIES, HIDDEN = 8, 1024
"""Members of S, and numbers of each of their rows, that one program gathers at a time."""
COLUMNS = 1024
"""Logits that one program turns into gradients, or members of S."""
TILE, MEMBERS = 2, 16
"""The backward computes 1/TILE of a chunk's logits at a time, and adds 1/MEMBERS of as many members of S, the most that
the list of a part has room for unless the part is a block: the products with a tile, and the sorted copies of the
members, need memory as well."""


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
        size = max(1, chunk // vocab)
        size -= size % ROWS if size > ROWS else 0
        ctx.chunk, ctx.part = chunk, size * max(1, chunk // MEMBERS // max(1, room) // size)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        rules = _Rules(token_ids.contiguous(), threshold.contiguous(), tau.contiguous())
        found, parts = _Found.make(rules.tau), list[_Members]()
        with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call] # where Triton launches
            scratch = _Scratch.make(min(size, len(hidden)), vocab, hidden, tau)
            for start in range(0, max(1, len(hidden)), ctx.part):
                part = slice(start, min(start + ctx.part, len(hidden)))
                parts.append(_scan_part(part, hidden, head, bias, rules, found, scratch, room))
                if learning and len(parts) > 1:  # the device is busy with the last one meanwhile
                    parts[-2] = parts[-2].trimmed()
            out = found.read(rules)
        if learning:
            ctx.num_found = [part.num_found for part in parts]
            lists = (values for part in parts for values in (part.column, part.weight))
            kept = found.number, found.ends, found.peak, found.kept
            ctx.save_for_backward(hidden, head, bias, *rules, out.inside, *kept, *lists)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, head, bias, token_ids, threshold, tau, inside, number, ends, peak, kept, *lists = ctx.saved_tensors
        of_weight, of_bias = (
            like.new_empty(like.shape, dtype=dtype) if like is not None and needed else None
            for like, dtype, needed in zip((head, bias), ctx.dtypes, ctx.needs_input_grad[1:3], strict=True)
        )
        total = _Gradients(hidden.new_empty(hidden.shape), of_weight, of_bias)
        columns = _Listed(number, token_ids, tau, kept, inside, upstream.contiguous())
        with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call] # where Triton launches
            num_members, num_dense = zip(*(num_found() for num_found in ctx.num_found), strict=True)
            for parts in _together(num_members, ctx.chunk // MEMBERS):
                rows = slice(parts.start * ctx.part, parts.stop * ctx.part)
                own = _Listed(*(each[rows] for each in columns))
                members = _joined(parts, num_members, ends[rows].split(ctx.part), lists[::2], lists[1::2])
                into = total._replace(hidden=total.hidden[rows])
                _add_sparse(into, hidden[rows], head, own, *members, fresh=parts.start == 0)
            if any(num_dense):
                slope = upstream[:, None] / tau
                dense = (inside & (upstream != 0) & (number < 0)).nonzero()[:, 0]
                known = _Rows(token_ids, threshold, tau, peak, slope, slope / kept)
                _add_dense(total, hidden, head, bias, known, dense, ctx.chunk // TILE)
        return *total, *(None,) * 6


class _Rules(NamedTuple):
    """Token and settings of each row, contiguous."""

    token_ids: Int[Tensor, "N 1"]
    threshold: Float[Tensor, "N 1"]
    tau: Float[Tensor, "N 1"]


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


class _Listed(NamedTuple):
    """What the gradients of the listed members of each row follow from."""

    number: Int[Tensor, " n"]
    token_ids: Int[Tensor, "n 1"]
    tau: Float[Tensor, "n 1"]
    kept: Float[Tensor, "n 1"]
    inside: Bool[Tensor, " n"]
    upstream: Float[Tensor, " n"]
    """Gradient of the loss by the row's log-prob."""


class _Gradients(NamedTuple):
    """Sums over rows, each contiguous."""

    hidden: Float[Tensor, "N H"]
    weight: Float[Tensor, "V H"] | None
    bias: Float[Tensor, " V"] | None


class _Found(NamedTuple):
    """What the scan finds of each row."""

    own: Float[Tensor, "N 1"]
    """Logit of the row's token."""
    peak: Float[Tensor, "N 1"]
    """Largest logit; NaN in a row that is not finite."""
    kept: Float[Tensor, "N 1"]
    """Sum of exp((z - peak) / tau) over S."""
    total: Float[Tensor, "N 1"]
    """The same over the vocabulary."""
    size: Int[Tensor, " N"]
    """Number of members of S."""
    number: Int[Tensor, " N"]
    """Number of listed members: `size` in a sparse row, -1 in a dense row."""
    ends: Int[Tensor, " N"]
    """Where they end in the list of the part."""

    @classmethod
    def make(cls, tau: Tensor) -> _Found:
        """Memory for it."""
        sums = (torch.empty_like(tau) for _ in range(4))
        return cls(*sums, *(torch.empty(len(tau), dtype=torch.int32, device=tau.device) for _ in range(3)))

    def read(self, rules: _Rules) -> Constrained:
        """The results for the token of each row."""
        total = torch.maximum(self.total, self.kept)  # the same terms in another order may sum to less
        block = constrain(self.own, rules.threshold, rules.tau, self.peak)._replace(kept=self.kept, total=total)
        return block.read(torch.zeros_like(self.size[:, None], dtype=torch.long))._replace(kept_count=self.size)


class _Scratch(NamedTuple):
    """Memory of a block; the next block overwrites it."""

    logits: Float[Tensor, " r*V"]
    tops: Float[Tensor, "r pieces"]
    """Largest logit of each piece."""
    piece_masses: Float[Tensor, "r pieces"]
    """Sum of exp((z - largest) / tau) over each piece."""
    counts: Int[Tensor, "r groups"]
    """Members of S in each group of pieces."""
    masses: Float[Tensor, "r groups"]
    """Their sum of exp((z - peak) / tau)."""

    @classmethod
    def make(cls, rows: int, vocab: int, hidden: Tensor, tau: Tensor) -> _Scratch:
        pieces = triton.cdiv(vocab, PIECE)
        groups = triton.cdiv(pieces, GROUP)
        counts = torch.empty(rows, groups, dtype=torch.int32, device=tau.device)
        tops, piece_masses, masses = (tau.new_empty(rows, number) for number in (pieces, pieces, groups))
        return cls(hidden.new_empty(rows * vocab), tops, piece_masses, counts, masses)


class _Members(NamedTuple):
    """Members of S of the sparse rows of a part, row by row, and memory for more."""

    column: Int[Tensor, " room"]
    weight: Float[Tensor, " room"]
    """exp((z - peak) / tau)"""
    num_found: Callable[[], list[int]]
    """Waits for the number of members and of dense rows."""

    def trimmed(self) -> _Members:
        found = self.num_found()
        return _Members(self.column[: found[0]].clone(), self.weight[: found[0]].clone(), lambda: found)


def _product(states: Tensor, head: Tensor, bias: Tensor | None, buffer: Tensor) -> Float[Tensor, "r c"]:
    """Logits, in the buffer."""
    out = buffer[: len(states) * len(head)].view(len(states), len(head))
    if bias is None:
        return torch.mm(states, head.T, out=out)
    return torch.addmm(bias.to(states.dtype), states, head.T, out=out)


def _scan_part(
    part: slice,
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    rules: _Rules,
    found: _Found,
    scratch: _Scratch,
    room: int,
) -> _Members:
    """Fills `found` and lists the members of S. A row is dense if it keeps more than `room` tokens."""
    most = (part.stop - part.start) * room
    column, weight = found.size.new_empty(most), found.kept.new_empty(most)
    num_found = column.new_zeros(2)
    for start in range(part.start, part.stop, max(1, len(scratch.tops))):
        rows = slice(start, min(start + len(scratch.tops), part.stop))
        logits = _product(hidden[rows], head, bias, scratch.logits)
        own = _Rules(*(each[rows] for each in rules)), _Found(*(each[rows] for each in found))
        _scan(logits, *own, scratch, room, column, weight, num_found)
    return _Members(column, weight, _fetch(num_found))


def _scan(
    logits: Float[Tensor, "r V"],
    rules: _Rules,
    found: _Found,
    scratch: _Scratch,
    room: int,
    column: Tensor,
    weight: Tensor,
    num_found: Int[Tensor, " 2"],
) -> None:
    (rows, vocab), (token_ids, threshold, tau) = logits.shape, rules
    _, tops, piece_masses, counts, masses = scratch
    (_, pieces), (_, groups) = tops.shape, counts.shape
    found.own.copy_(logits.gather(1, token_ids))  # refuses a token id outside the vocabulary
    _tops_kernel[(rows, triton.cdiv(pieces, PIECES))](
        logits, tau, tops, piece_masses, vocab, pieces, PIECES=PIECES, PIECE=PIECE
    )
    _peak_kernel[(rows,)](tops, piece_masses, tau, found.peak, found.total, pieces, ALL=triton.next_power_of_2(pieces))
    _count_kernel[(rows * groups,)](
        *(logits, threshold, tau, found.peak, tops, counts, masses, vocab, pieces, groups),
        PIECE=PIECE,
        GROUP=GROUP,
        num_warps=1,
    )
    every = triton.next_power_of_2(groups)
    _sums_kernel[(1,)](
        *(counts, masses, found.peak, found.kept, found.size, found.number, found.ends, num_found, rows, groups, room),
        BLOCK=max(1, COUNTS // every),
        GROUPS=every,
        num_warps=16,
    )
    if room:
        _list_kernel[(rows * groups,)](
            *(logits, threshold, tau, found.peak, tops, counts, found.number, found.ends, column, weight),
            *(vocab, pieces, groups),
            PIECE=PIECE,
            GROUP=GROUP,
            GROUPS=every,
            num_warps=1,
        )


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


def _together(counts: Sequence[int], most: int) -> Iterator[range]:
    """Stretches of parts with at most `most` members, but at least one part. Each stretch rounds a gradient in half
    precision once."""
    start = total = 0
    for stop, count in enumerate(counts):
        if stop > start and total + count > most:
            yield range(start, stop)
            start, total = stop, 0
        total += count
    yield range(start, len(counts))


def _joined(
    parts: range, counts: Sequence[int], ends: Sequence[Tensor], columns: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Int[Tensor, " n"], Int[Tensor, " k"], Float[Tensor, " k"]]:
    """The lists of these parts as one: where the members of each row end, and their columns and weights."""
    if len(parts) == 1:
        return ends[0], columns[parts[0]][: counts[parts[0]]], weights[parts[0]][: counts[parts[0]]]
    before = accumulate((counts[part] for part in parts), initial=0)
    return (
        torch.cat([end + offset for end, offset in zip(ends, before, strict=False)]),
        torch.cat([columns[part][: counts[part]] for part in parts]),
        torch.cat([weights[part][: counts[part]] for part in parts]),
    )


def _add_sparse(
    total: _Gradients,
    hidden: Float[Tensor, "n H"],
    head: Tensor,
    rows: _Listed,
    ends: Int[Tensor, " n"],
    column: Int[Tensor, " k"],
    weight: Float[Tensor, " k"],
    *,
    fresh: bool,
) -> None:
    """Adds the gradient of sparse rows: writes that of the hidden states of all rows given, and that of weight and bias
    if `fresh`. Nothing here waits for the device."""
    value, starts = torch.empty_like(weight), torch.empty_like(ends)
    row, key = torch.empty_like(column), torch.empty_like(column)
    _entries_kernel[(len(hidden),)](column, weight, ends, *rows, value, row, key, starts, len(head), BLOCK=COLUMNS)
    _gather(value, column, head, total.hidden, starts, ends, True)
    if total.weight is None and total.bias is None:
        return
    key, order = key.sort(stable=True)
    row, value = row[order], value[order]
    tokens = torch.arange(len(head) + 1, dtype=key.dtype, device=key.device)
    bounds = torch.searchsorted(key, tokens, out_int32=True)
    starts, ends = bounds[:-1], bounds[1:]
    if total.weight is not None:
        _gather(value, row, hidden, total.weight, starts, ends, fresh)
    if total.bias is not None:
        _gather(value, row, hidden.new_ones(len(hidden), 1), total.bias[:, None], starts, ends, fresh)


def _gather(
    value: Tensor, index: Tensor, source: Tensor, into: Tensor, starts: Tensor, ends: Tensor, fresh: bool
) -> None:
    """into[i] += sum over the entries from `starts[i]` to `ends[i]` of value * source[index]; = if `fresh`."""
    width = source.shape[1]
    piece = min(HIDDEN, triton.next_power_of_2(width))
    _gather_kernel[(len(into), triton.cdiv(width, piece))](
        *(value, index, source.contiguous(), into, starts, ends, width), ENTRIES=ENTRIES, HIDDEN=piece, FRESH=fresh
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
def _sums_kernel(  # type: ignore[no-untyped-def]
    counts,
    masses,
    peak,
    kept,
    size,
    number,
    ends,
    num_found,
    rows,
    groups,
    room,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Sums over the groups of each row, and where its members end in the list. One program for all rows. `num_found`
    holds the members and the dense rows of the part so far."""
    listed, dense = tl.load(num_found), tl.load(num_found + 1)
    group = tl.arange(0, GROUPS)[None, :]
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        there = row < rows
        every = there[:, None] & (group < groups)
        count = tl.sum(tl.load(counts + row[:, None] * groups + group, every, 0), 1)
        mass = tl.sum(tl.load(masses + row[:, None] * groups + group, every, 0.0), 1)
        largest = tl.load(peak + row, there, 0.0)
        sparse = count <= room
        mine = tl.where(sparse, count, 0)
        tl.store(kept + row, mass + (largest - largest), there)
        tl.store(size + row, count, there)
        tl.store(number + row, tl.where(sparse, count, -1), there)
        tl.store(ends + row, listed + tl.cumsum(mine, 0), there)
        listed += tl.sum(mine, 0)
        dense += tl.sum((count > room).to(tl.int32), 0)
    tl.store(num_found, listed)
    tl.store(num_found + 1, dense)


@triton.jit  # type: ignore[untyped-decorator]
def _list_kernel(  # type: ignore[no-untyped-def]
    logits,
    threshold,
    tau,
    peak,
    tops,
    counts,
    number,
    ends,
    column,
    weight,
    vocab,
    pieces,
    groups,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Writes the members of S of a group of a sparse row down. Reads only pieces that have any."""
    own = tl.program_id(0)
    row, group = (own // groups).to(tl.int64), own % groups
    if (tl.load(number + row) > 0) & (tl.load(counts + own) > 0):
        limit, scale, largest = tl.load(threshold + row), tl.load(tau + row), tl.load(peak + row)
        later = tl.arange(0, GROUPS)
        rest = tl.load(counts + row * groups + later, (later >= group) & (later < groups), 0)
        place = tl.load(ends + row) - tl.sum(rest, 0)
        first = group * GROUP
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
def _entries_kernel(  # type: ignore[no-untyped-def]
    column,
    weight,
    ends,
    number,
    token_ids,
    tau,
    kept,
    inside,
    upstream,
    value,
    index,
    key,
    starts,
    vocab,
    BLOCK: tl.constexpr,
):
    """Gradient, row and sort key of each member of a row, and where they start in the list. Without a gradient the row
    has no entries, and its members are sorted behind the vocabulary."""
    row = tl.program_id(0)
    pull, end, count = tl.load(upstream + row), tl.load(ends + row), tl.maximum(tl.load(number + row), 0)
    alive = tl.load(inside + row) & (pull != 0)
    tl.store(starts + row, tl.where(alive, end - count, end))
    slope, token = pull / tl.load(tau + row), tl.load(token_ids + row)
    share = slope / tl.load(kept + row)
    for start in range(end - count, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        there = entry < end
        member = tl.load(column + entry, there, 0)
        gradient = tl.where(member == token, slope, 0.0) - tl.load(weight + entry, there, 0.0) * share
        tl.store(value + entry, gradient, there)
        tl.store(index + entry, row, there)
        tl.store(key + entry, tl.where(alive, member, vocab), there)


@triton.jit  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    value,
    index,
    source,
    into,
    starts,
    ends,
    width,
    ENTRIES: tl.constexpr,
    HIDDEN: tl.constexpr,
    FRESH: tl.constexpr,
):
    run = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * HIDDEN + tl.arange(0, HIDDEN)
    inside = columns < width
    first, end = tl.load(starts + run), tl.load(ends + run)
    if FRESH or first < end:
        total = tl.zeros([HIDDEN], value.dtype.element_ty)
        for start in range(first, end, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            there = entry < end
            share = tl.load(value + entry, there, 0.0)
            row = tl.load(index + entry, there, 0).to(tl.int64)
            part = tl.load(source + row[:, None] * width + columns[None, :], there[:, None] & inside[None, :], 0.0)
            total += tl.sum(share[:, None] * part.to(share.dtype), 0)
        target = into + run * width + columns
        if not FRESH:
            total += tl.load(target, inside, 0.0)
        tl.store(target, total, inside)


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
