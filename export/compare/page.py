"""The study as files: one page that needs no network, its figures as PNG, and its numbers as JSON."""

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import jinja2
import msgspec
from markupsafe import Markup

from export.compare.figures import draw
from export.compare.study import Placement, Study
from export.errors import ConfigError
from export.shown import size
from serving.atomic import replacing

PAGE = "report.html"
NUMBERS = "study.json"


def write_report(study: Study, folder: Path) -> list[Path]:
    """Write the page, its figures and its numbers into `folder`, each whole or not at all.

    Returns:
        What was written, the page first.

    Raises:
        ConfigError: the folder cannot be written.
    """
    pictures = list(draw(study))
    encoded = msgspec.json.format(msgspec.json.encode(study), indent=1)
    shown = {each.name: {"alt": each.alt, "svg": base64.b64encode(each.encoded("svg")).decode()} for each in pictures}
    files = {
        PAGE: _page(study, shown, encoded.decode()).encode(),
        NUMBERS: encoded + b"\n",
        **{f"{each.name}.png": each.encoded("png") for each in pictures},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            with replacing(folder / name) as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error
    return [folder / name for name in files]


def findings(study: Study) -> Iterator[str]:
    """What a person should take away, a sentence each."""
    for dtype, one in study.one_rank.items():
        yield (
            f"Whole on one rank, {dtype} answers {study.batch_size} samples in {_ms(one.latency_s)} ms and holds "
            f"{size(one.largest_rank_bytes)}."
        )
    dtype = next(iter(study.one_rank))
    for best in _best(study):
        if best.dtype != dtype:
            continue
        gain = best.latency_s / best.over_one_rank / best.side_by_side_s
        worth = f"{gain:.2f} times as fast as one rank" if gain > 1 else f"no faster than one rank ({gain:.2f} times)"
        yield (
            f"On {best.ranks} ranks, {best.strategy} is best: {_ms(best.latency_s)} ms in one process "
            f"({_ratio(best.over_one_rank)} times one rank's), {_ms(best.side_by_side_s)} ms side by side before the "
            f"network, {worth}; the fullest rank holds {size(best.largest_rank_bytes)}, a batch moves "
            f"{size(best.traffic_bytes)}."
        )
    if not any(each.over_one_rank < 1 for each in study.placements if each.error is None):
        yield "In one process no way of cutting is faster than one rank: cut only what does not fit."


def _best(study: Study) -> list[Placement]:
    """Of each number of ranks and dtype, the placement with the least time side by side."""
    best: dict[tuple[int, str], Placement] = {}
    for each in study.placements:
        group = each.ranks, each.dtype
        if each.error is None and (group not in best or each.side_by_side_s < best[group].side_by_side_s):
            best[group] = each
    return list(best.values())


def _page(study: Study, pictures: dict[str, dict[str, str]], encoded: str) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.ChainableUndefined
    )
    environment.filters |= {"ms": _ms, "bytes": size, "ratio": _ratio, "count": _count, "error": _error}
    best = _best(study)
    return environment.get_template("page.html").render(
        study=study,
        pictures=pictures,
        findings=list(findings(study)),
        best=[number for number, each in enumerate(study.placements) if each in best],
        floats=sum(4 * table.rows * table.dim for table in study.tables.values()),
        first_dtype=next(iter(study.one_rank)),
        made_at=datetime.fromtimestamp(study.made_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        # "</script>" in a table's name must not end the element.
        json=Markup(json.dumps(json.loads(encoded)).replace("<", "\\u003c")),  # noqa: S704
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _ratio(number: float) -> str:
    return f"{number:.2f}"


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _error(number: float) -> str:
    return f"{number:.1e}" if number else "0"
