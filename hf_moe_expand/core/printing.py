"""Prints pages and tables."""

from pathlib import Path


def print_or_write(text: str, out: Path | None) -> None:
    """Prints a page, or writes it to a file."""
    if out is None:
        print(text, end="" if text.endswith("\n") else "\n")
    else:
        from ..core.jsonfile import write_text

        write_text(out, text)
        print(f"wrote {out}")


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Prints a table whose first column is words, and the others numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*header)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    Console().print(table)
