"""Tables of HTML, as which notebooks show objects that have a `_repr_html_`."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

# More rows are counted, not shown.
MOST_ROWS = 100


def notebook_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of HTML. Integers have separators of thousands, and are right-aligned. All text is escaped.

    Args:
        caption: the line above the table.
        columns: names of the columns.
        rows: a value for each column. Of more than `MOST_ROWS`, the number of the others is shown.
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
