"""Sampling from the constrained policy by inverse CDF: one uniform per row, one pass over the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .policy import Block, Setting, as_column, as_rows, constrain, split_rows

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64, Int


CELL = 64
BELOW_ONE = 1 - 2.0**-53


class Draw(NamedTuple):
    """One token per row. Greedy rows have logprob 0, kept mass 1 and kept count 1."""

    token_ids: Int[Tensor, "*batch"]
    logprobs: Float[Tensor, "*batch"]
    """Equal to those of `constrained_logprobs` for the same logits; NaN where the row was not finite."""
    kept_mass: Float[Tensor, "*batch"]
    kept_count: Int[Tensor, "*batch"]


def finite_rows(logits: Float[Tensor, "*batch vocab"]) -> Bool[Tensor, "*batch"]:
    """Rows that can be sampled: no NaN, no +inf, at least one finite logit. (-inf is a token of probability zero.)"""
    # In exactly the other rows the maximum is NaN, +inf or -inf.
    return logits.amax(-1).isfinite()


@torch.no_grad()
def sample(
    logits: Float[Tensor, "*batch vocab"],
    uniforms: Float64[Tensor, "*batch"],
    *,
    log_min_p: Setting,
    temperature: Setting,
) -> Draw:
    """Draws one token of S per row: the one whose interval of the cumulated probabilities holds the row's uniform.

    `uniforms` are in [0, 1). Temperature 0, as a float or in single rows of a tensor, takes the most likely token (the
    first of ties). Check `finite_rows` first: the token of a row that is not finite is meaningless. Raises ValueError
    if the shapes do not match.
    """
    if uniforms.shape != logits.shape[:-1]:
        raise ValueError(
            f"uniforms has shape {tuple(uniforms.shape)}, expected {tuple(logits.shape[:-1])} to match the logits"
        )
    greedy = torch.as_tensor(temperature == 0, device=logits.device)
    temperature = temperature.masked_fill(greedy, 1.0) if isinstance(temperature, Tensor) else temperature or 1.0
    rows, threshold, tau = as_rows(logits, log_min_p, temperature)
    columns = uniforms.to(torch.float64).reshape(-1, 1), as_column(greedy, uniforms.shape)
    blocks = split_rows(rows, threshold, tau, *columns)
    parts = [_draw(constrain(block, threshold, tau), *own) for block, threshold, tau, *own in blocks]
    return Draw(*(torch.cat(part).view(uniforms.shape) for part in zip(*parts, strict=True)))


def _draw(block: Block, uniforms: Float64[Tensor, "rows 1"], greedy: Bool[Tensor, "rows 1"]) -> Draw:
    drawn = _invert(block.weight, uniforms.masked_fill(greedy, 0.0))
    member = block.keep.gather(-1, drawn).bool() & ~greedy
    # In exact arithmetic the first entry above the target is a member; a parallel scan rounds. The maximum always is.
    if member.device.type != "cpu" or not member.all():
        drawn = torch.where(member, drawn, block.scaled.argmax(-1, keepdim=True))
    logprobs, mass, count, _ = block.read(drawn)
    greedy = greedy.view(-1) if greedy.dim() else greedy
    # l - l is 0, or NaN in a row that is not finite.
    logprobs = torch.where(greedy, logprobs - logprobs, logprobs)
    return Draw(drawn.squeeze(-1), logprobs, mass.masked_fill(greedy, 1.0), count.masked_fill(greedy, 1))


def _invert(weights: Float[Tensor, "rows vocab"], uniforms: Float64[Tensor, "rows 1"]) -> Int[Tensor, "rows 1"]:
    """The entry of each row whose interval of the cumulated weights, in float64, holds the row's uniform.

    The search has two levels: first the cell of CELL entries, then the entry in it. Summing cells is vectorised; a scan
    of the whole vocabulary is not.
    """
    rows, vocab = weights.shape
    if vocab <= 4 * CELL:
        return _search(weights, uniforms)[0]
    cells = pad(weights, (0, -vocab % CELL)).view(rows, -1, CELL)
    cell, rest = _search(cells.sum(-1), uniforms)
    entry, _ = _search(cells.take_along_dim(cell.unsqueeze(-1), 1).squeeze(1), rest)
    return (cell * CELL + entry).clamp_(max=vocab - 1)


def _search(
    weights: Float[Tensor, "rows n"], uniforms: Float64[Tensor, "rows 1"]
) -> tuple[Int[Tensor, "rows 1"], Float64[Tensor, "rows 1"]]:
    """The entry whose interval of the cumulated weights holds the uniform, and the position within it, in [0, 1)."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    target = uniforms * cdf[:, -1:]
    entry = torch.searchsorted(cdf, target, right=True).clamp_(max=weights.shape[-1] - 1)
    own = weights.gather(-1, entry)
    rest = (target - (cdf.gather(-1, entry) - own)) / own
    return entry, rest.clamp_(0.0, BELOW_ONE)
