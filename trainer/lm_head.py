"""The LM head under the constrained policy: from hidden states to log-probs, never [tokens, vocabulary] in memory.

With G[i, k] = d log pi_mp(a_i) / d z_ik = (1[k = a_i] - pi_mp(k)) / tau on S_i, and exactly 0 off it,

    d / d hidden = diag(upstream) G W        d / d W = (diag(upstream) G)^T hidden

Where S is small, G is sparse: |S| entries a row instead of the vocabulary. Forward computes logits chunk by chunk and
keeps of each block of rows only its entries of G; backward is two sparse products. A block that keeps more than
`max_share` of its logits is dense, and its logits are computed again. Rows without slope (vetoed, rejected, outside)
cost the backward nothing.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from services.dvp.policy import Block, Constrained, Setting, as_rows, constrain, logit_gradient, split_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MAX_SHARE = 0.05
"""Kept share of a block's logits above which its backward is dense: an estimate from one machine's CPU, for
`python -m tests.benchmarks.lm_head` to settle."""
CPU_CHUNK, DEVICE_CHUNK = 2**23, 2**27
"""Logits in memory at a time: 32 MiB of float32 on a CPU, 512 MiB on a device."""


def head_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None,
    token_ids: Int[Tensor, " tokens"],
    *,
    log_min_p: Setting,
    temperature: Setting,
    max_share: float = MAX_SHARE,
    chunk: int | None = None,
) -> Constrained:
    """`constrained_logprobs(hidden @ weight.T + bias, ...)`, differentiable (once) in hidden, weight and bias.

    Logits have the dtype of `hidden`, as under autocast; a float32 weight gets its gradient in float32. Memory: `chunk`
    logits (one row at least), and 8 bytes for every kept logit of a sparse block.
    """
    if chunk is None:
        chunk = CPU_CHUNK if hidden.device.type == "cpu" else DEVICE_CHUNK
    if weight.dtype not in (torch.float32, torch.float64):
        max_share = 0.0  # PyTorch has no sparse products in half precision on a CPU
    _, threshold, tau = as_rows(hidden, log_min_p, temperature)
    rules = (setting.to(hidden.device).expand(len(hidden), 1) for setting in (threshold, tau))
    chunk_rows = max(1, chunk // weight.shape[0])
    outputs = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, token_ids.unsqueeze(-1), *rules, max_share, chunk_rows, torch.is_grad_enabled()
    )
    return Constrained(*outputs)


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
        chunk_rows: int,
        recording: bool,
    ) -> Constrained:
        # Without gradient mode, inputs that need one still say so.
        learning = recording and any(ctx.needs_input_grad[:3])
        head = _Head(weight, bias, hidden, chunk_rows)
        out = Constrained(
            *(
                token_ids.new_empty(len(hidden), dtype=dtype)
                for dtype in (tau.dtype, tau.dtype, torch.int32, torch.bool)
            )
        )
        is_sparse = torch.zeros_like(out.inside)
        entries = [_Entries(0, tau).trimmed()]
        for states, *rows in split_rows(hidden, token_ids, threshold, tau, is_sparse, *out, size=chunk_rows):
            logits = head(states)
            found = _Entries(int(max_share * logits.numel()) if learning else 0, tau)
            for piece, ids, limit, temperature, sparse, *target in split_rows(logits, *rows):
                block = constrain(piece, limit, temperature)
                for values, into in zip(block.read(ids), target, strict=True):
                    into.copy_(values)
                if learning and int(target[2].sum()) <= max_share * piece.numel():
                    found.add(block, ids)
                    sparse.fill_(True)
            entries.append(found.trimmed())
        ctx.save_for_backward(hidden, weight, bias, token_ids, threshold, tau)
        ctx.entries = is_sparse, out.inside, out.kept_count, *(torch.cat(part) for part in zip(*entries, strict=True))
        # The logits of a single chunk may stay: that is no more memory than computing them took.
        ctx.logits = logits if learning and len(hidden) <= chunk_rows and not is_sparse.all() else None
        ctx.chunk_rows = chunk_rows
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, threshold, tau = ctx.saved_tensors
        is_sparse, inside, count, columns, slopes = ctx.entries
        slope = upstream.unsqueeze(-1) / tau
        active = inside & (upstream != 0)
        total = _HeadGradient(hidden, weight, bias)

        rows = (active & is_sparse).nonzero()[:, 0]
        mine = active[is_sparse].repeat_interleave(count[is_sparse])
        total.add_sparse(rows, count[rows], columns[mine], slopes[mine] * slope[rows, 0].repeat_interleave(count[rows]))

        dense = (active & ~is_sparse).nonzero()[:, 0]
        head = _Head(weight, bias, hidden, ctx.chunk_rows) if len(dense) and ctx.logits is None else None
        for chunk in dense.split(ctx.chunk_rows) if len(dense) else ():
            logits = ctx.logits[chunk] if head is None else head(hidden[chunk])
            for piece, ids, pull, member, *limits in split_rows(
                logits, token_ids[chunk], slope[chunk], active[chunk, None], threshold[chunk], tau[chunk]
            ):
                piece.copy_(logit_gradient(constrain(piece, *limits), ids, pull, member))
            total.add_dense(chunk, logits)
        return total.hidden, total.weight, total.bias, *(None,) * 6


class _Head:
    """Logits of a chunk in the dtype of the hidden states; each call overwrites what the one before returned."""

    def __init__(self, weight: Tensor, bias: Tensor | None, hidden: Tensor, chunk_rows: int) -> None:
        self._weight = weight.to(hidden.dtype)
        self._bias = None if bias is None else bias.to(hidden.dtype)
        self._logits = hidden.new_empty(min(chunk_rows, len(hidden)), len(weight))

    def __call__(self, states: Tensor) -> Tensor:
        out = self._logits[: len(states)]
        if self._bias is None:
            return torch.mm(states, self._weight.T, out=out)
        return torch.addmm(self._bias, states, self._weight.T, out=out)


class _Entries:
    """Columns and values of G on S, row after row, of one chunk.

    In one buffer: small tensors that outlive the blocks they lie between would tear a CPU's heap to pieces.
    """

    def __init__(self, capacity: int, like: Tensor) -> None:
        self._columns, self._values = like.new_empty(capacity, dtype=torch.int32), like.new_empty(capacity)
        self._size = 0

    def add(self, block: Block, token_ids: Tensor) -> None:
        row, column = block.keep.nonzero(as_tuple=True)
        here = slice(self._size, self._size + len(row))
        policy = block.weight[row, column] / block.kept[row, 0]
        self._columns[here] = column
        self._values[here] = (column == token_ids[row, 0]).to(self._values.dtype) - policy
        self._size = here.stop

    def trimmed(self) -> tuple[Tensor, Tensor]:
        return self._columns[: self._size].clone(), self._values[: self._size].clone()


class _HeadGradient:
    """The sums over rows; `weight` and `bias` are None where no gradient is wanted."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._states, self._head = hidden, weight
        self.hidden = torch.zeros_like(hidden)
        self.weight = torch.zeros_like(weight) if weight.requires_grad else None
        self.bias = torch.zeros_like(bias) if bias is not None and bias.requires_grad else None

    def add_sparse(self, rows: Tensor, count: Tensor, columns: Tensor, values: Tensor) -> None:
        """`values` [nnz] in `columns` [nnz] of the logits' gradient, `count` of them in each of `rows`."""
        if not len(rows):
            return
        matrix = _csr(count, columns, values.to(self._head.dtype), self._head.shape[0])
        self.hidden[rows] = (matrix @ self._head).to(self.hidden.dtype)
        if self.weight is not None:
            self.weight.addmm_(matrix.t(), self._states[rows].to(self.weight.dtype))
        if self.bias is not None:
            self.bias.index_add_(0, columns, values.to(self.bias.dtype))

    def add_dense(self, rows: Tensor, gradient: Tensor) -> None:
        """`gradient` [rows, vocab] of the logits."""
        self.hidden[rows] = gradient @ self._head.to(gradient.dtype)
        if self.weight is not None:
            if self.weight.dtype is gradient.dtype:
                self.weight.addmm_(gradient.T, self._states[rows])
            else:
                self.weight += gradient.T @ self._states[rows]
        if self.bias is not None:
            self.bias += gradient.sum(0)


def _csr(count: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    starts = torch.cat([count.new_zeros(1), count.cumsum(0, dtype=count.dtype)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        return torch.sparse_csr_tensor(starts, columns, values, (len(count), width), check_invariants=False)
