"""HTML tables for notebooks, which show an object by its `_repr_html_`."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

# Further rows are only counted.
MOST_ROWS = 100


def notebook_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table. Integers have thousands separators and are right-aligned. All text is escaped.

    Args:
        caption: the line above the table.
        columns: the names of the columns.
        rows: rows with a value for each column. At most `MOST_ROWS` are shown, then a line counts the remaining ones.
    """
    remaining = iter(rows)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in islice(remaining, MOST_ROWS))
    if more := sum(1 for _ in remaining):
        body += f'<tr><td colspan="{len(columns)}">… {more:,} more</td></tr>'
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return f"<p>{escape(caption)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f'<td style="text-align: right">{value:,}</td>'
    return f"<td>{escape(str(value))}</td>"
