"""Text for a terminal: 100 columns, in which nothing is cut off.

It leaves out tables of figures, which know their own widths (`recipes.audit_report`, `recipes.benchmark_report`).
"""

from __future__ import annotations

import textwrap

WIDTH = 100
"""Columns that every terminal has."""


def folded(text: str, hang: int | None = None, width: int = WIDTH) -> str:
    """Text whose long lines go on below, between words alone: a path stays whole, whatever its length.

    Args:
        text: Any number of lines.
        hang: Columns that a line's continuation is indented by; None: to where its value begins, after `key: `.
        width: Columns that there are.

    Example:
        >>> print(folded("model: adm_64, dit_b_2, dit_l_2", width=22))
        model: adm_64,
               dit_b_2,
               dit_l_2
    """
    lines = []
    for line in text.split("\n"):
        start = len(line) - len(line.lstrip())
        key, colon, _ = line.partition(": ")
        indent = hang if hang is not None else len(key + colon) if colon and len(key) < width // 2 else start + 2
        whole = len(line) <= width
        lines += [line] if whole else textwrap.wrap(
            line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )  # fmt: skip
    return "\n".join(lines)


def said(label: str, text: str) -> str:
    """A line of a report, `label            text`, folded below the text.

    Example:
        >>> print(said("steps", "400"))
        steps            400
    """
    return folded(f"{label:<17}{text}", hang=17)
