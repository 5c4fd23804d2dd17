"""Completions on a terminal. They hold prompts, so nothing is printed where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dvp_rl.contract.completions import ENVIRONMENT, PRUNED, Completion

if TYPE_CHECKING:
    from rich.table import Table

TERMINAL_ROWS = 4
PROMPT_CHARACTERS = 200
"""Of a prompt, its end."""
TERMINAL_CHARACTERS = 400
"""Of a completion, its beginning."""
TERMINAL_LINES = 12
WIDE = 80
"""Columns of a terminal from which the table has more than one column."""
COLOURS = {"yellow": "yellow", "orange": "orange1", "red": "red"}
"""Names of colours, and of rich's styles, for more and more that min-p removed."""
BIDIRECTIONAL = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
CONTROLS = dict.fromkeys({*range(32), *range(0x7F, 0xA0), *BIDIRECTIONAL} - {ord("\t"), ord("\n")}, "\ufffd")
"""Replaces control characters: a completion must not steer the terminal, or turn a line around."""


def completions_table(step: int, completions: Sequence[Completion], *, width: int, encoding: str = "utf-8") -> Table:
    """For a terminal of `width` columns. Each prompt is shown once, its line breaks as arrows; colours show how much
    probability min-p removed."""
    from rich.table import Table
    from rich.text import Text

    def shown(pieces: Iterable[tuple[str, str]]) -> Text:
        """The beginning of the text, with what the terminal cannot show replaced."""
        text, room = Text(), TERMINAL_CHARACTERS
        for piece, style in pieces:
            clean = piece.translate(CONTROLS).encode(encoding, "replace").decode(encoding)
            text.append(clean[:room], style)
            room -= len(clean)
            if room < 0 or text.plain.count("\n") >= TERMINAL_LINES:
                return text.append(" ...")
        return text

    styles = {0: "", ENVIRONMENT: "dim", **dict(enumerate(COLOURS.values(), start=1))}
    shares = ", ".join(f"{colour} {100 * share:g} %" for colour, share in zip(COLOURS, PRUNED, strict=True))
    given = "; dim: the environment's" if any(each.num_environment for each in completions) else ""
    table = Table(
        title=f"step {step}: best and worst completion of a prompt",
        caption=f"colours: min-p removed at least this much probability: {shares}{given}",
        show_lines=True,
        show_header=width >= WIDE,
        expand=True,
    )
    table.add_column("prompt", ratio=2, overflow="fold")
    if width >= WIDE:
        table.add_column("completion", ratio=3, overflow="fold")
        for name in ("reward", "advantage", "training"):
            table.add_column(name, justify="right")
    before = None
    for completion in completions[:TERMINAL_ROWS]:
        end = completion.prompt[-PROMPT_CHARACTERS:].replace("\n", "↵")
        prompt = shown([(end, "dim")] if completion.prompt != before else [])
        text = shown((piece, styles[mark]) for piece, mark in completion.marked())
        facts = (f"{completion.reward:.3g}", f"{completion.advantage:.3g}", completion.fate)
        if width >= WIDE:
            table.add_row(prompt, text, *facts)
        else:
            told = Text("reward {}, advantage {}, {}".format(*facts))
            table.add_row(Text("\n").join(filter(None, [prompt, text, told])))
        before = completion.prompt
    return table
