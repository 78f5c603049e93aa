"""What an audit has found, on a terminal: figures that tell layers apart, in tables of a hundred columns.

Why it exists: all figures of a layer are a line that no terminal holds. Those that are the same in every layer are said
once, and where the others are still too wide, activations and gradients stand in tables of their own.

It leaves out the figures (`lightning_mixprec.audit_result`), all of which the text in TensorBoard keeps.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lightning_mixprec.audit_result import Audit

WIDTH = 100
"""Columns of the narrowest terminal that tables are made for, and of files."""

WORDS = ("layer", "type", "dtype")
"""Columns that are no numbers."""


class Column(NamedTuple):
    """A column of figures.

    Attributes:
        group: What they are of.
        name: As `Audit.table` has it.
        heading: Short, in two lines.
        cells: From the first layer to the last.
    """

    group: str
    name: str
    heading: str
    cells: list[str]


def columns_of(found: Audit) -> tuple[list[list[str]], list[Column]]:
    """Words of the layers (name, type, dtype), and the columns of figures."""
    header, *rows = found.table()
    short = {
        "activation": "act.\nmax",
        "gradient": "grad.\nmax",
        "lost updates": "\nlost",
        "fp8 error": "fp8\nerror",
    }
    group, columns = "", []
    for index, name in enumerate(header[len(WORDS) : -1], len(WORDS)):  # the last says why, in a sentence
        group = name if name in ("activation", "gradient") else "rest" if name == "lost updates" else group
        columns.append(Column(group, name, short.get(name, f"\n{name}"), [row[index] for row in rows]))
    return [row[: len(WORDS)] for row in rows], columns


def tables(found: Audit, width: int) -> list[Table]:
    """One table if it fits, else one of activations and one of the rest; without columns of equal figures.

    Args:
        found: What an audit has found.
        width: Columns that there are.
    """
    words, columns = columns_of(found)
    telling = [column for column in columns if len(set(column.cells)) > 1]
    red = [bool(layer.reason) for layer in found.layers if layer.parameters or layer.reason]
    whole = _table(words, WORDS, telling, red)
    first = [column for column in telling if column.group == "activation"]
    second = [column for column in telling if column.group != "activation"]
    if _width(whole) <= width or not first or not second:
        return [whole]
    return [_table(words, WORDS, first, red), _table(words, ("layer", "dtype"), second, red)]


def _table(words: list[list[str]], shown: tuple[str, ...], columns: list[Column], red: list[bool]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in shown:
        table.add_column(f"\n{name}", no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for index, row in enumerate(words):
        cells = [cell for cell, name in zip(row, WORDS, strict=True) if name in shown]
        cells += [column.cells[index] for column in columns]
        table.add_row(*map(Text, cells), style="red" if red[index] else None)
    return table


def _width(table: Table) -> int:
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def legend(found: Audit) -> list[str]:
    """What the columns are, and the figures that all layers have in common."""
    _, columns = columns_of(found)
    narrow, same = found.policy.without_fp8().compute, []
    constant = [column for column in columns if len(set(column.cells)) == 1]
    for (group, value), equal in groupby(constant, key=lambda column: (column.group, column.cells[0])):
        names = ["max" if column.name == group else column.name for column in equal]
        same.append(f"{group if group != 'rest' else ''} {', '.join(names)}: {value}".strip())
    return [
        f"max: largest magnitude; shares that {narrow} overflows (>max), flushes to 0 (->0), makes subnormal (sub);",
        "fp8: what fp8 overflows or flushes without scales; lost: updates too small for weights without masters",
        *([f"the same in all layers: {'; '.join(same)}"] if same else []),
    ]


def show(found: Audit, console: Console) -> None:
    """Print tables, the layers that must be fp32 in red, and why.

    Args:
        found: What an audit has found.
        console: Where; widened for names that leave no room for figures.
    """
    console.width = max(console.width, WIDTH)
    made = tables(found, console.width)
    console.width = max(console.width, *map(_width, made))
    for table in made:
        console.print(table)
        console.print()
    for line in legend(found):
        console.print(line, highlight=False, soft_wrap=True)
    for name, reason in found.recommended.items():
        console.print(Text(f"{name} must be fp32: {reason}", style="red"), soft_wrap=True)
    console.print()
    for line in found.summary():
        console.print(Text(line), soft_wrap=True)
