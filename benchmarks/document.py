"""docs/benchmarks.md from the results of a run: the numbers are the run's, the words are of document.md.j2."""

import json
import os
from pathlib import Path
from typing import Any

import jinja2

TEMPLATE = "document.md.j2"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def write(results: Path) -> Path:
    """Write the page; its path."""
    draft = PAGE.with_suffix(".new")
    draft.write_text(render(json.loads(results.read_text())))
    os.replace(draft, PAGE)
    return PAGE


def render(run: dict[str, Any]) -> str:
    """The page.

    Raises:
        jinja2.UndefinedError: the run has no number of a name that the template asks for.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"ms": _ms, "rate": _rate, "ratio": _ratio, "bytes": _bytes}
    return environment.get_template(TEMPLATE).render(run=run, got=run["results"], ratios=run["ratios"])


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.2f} ms" if milliseconds < 10 else f"{milliseconds:,.1f} ms"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}"


def _ratio(number: float) -> str:
    return f"{number:.2f}"


def _bytes(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"
