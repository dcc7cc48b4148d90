"""Markdown tables of the benchmarks."""

import re
from collections.abc import Sequence

_FIGURE = re.compile(r"[-–\d.,]+")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of figures are right-aligned."""
    right = [all(_FIGURE.fullmatch(row[column]) for row in rows) for column in range(len(head))]
    lines = [head, ["---:" if r else "---" for r in right], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
