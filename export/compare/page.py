"""The files of a study: a page that needs no network, its figures as PNG, and all numbers as JSON."""

import base64
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import jinja2
import msgspec
from markupsafe import Markup

from export.compare.auc_figures import MOST_TABLES
from export.compare.dtype_study import DtypeStudy, Measured, MeasuredBundle
from export.compare.figures import NARROW, WIDE, Picture, draw
from export.compare.study import IN_ONE_PROCESS, MIXED, Placement, Study, Verdict, figure_of
from export.values import error_text, size_text
from serving.errors import ConfigurationError
from serving.files import replacing

PAGE = "report.html"
NUMBERS = "study.json"
RECOMMENDED = "recommended.toml"


def write_report(study: Study, folder: Path, settings: str | None) -> list[Path]:
    """Write the page, its figures and its numbers into `folder`. A file is written completely or not at all.

    Args:
        study: the study.
        folder: for the files.
        settings: the text of the recommended settings file, if there is one.

    Returns:
        The files, the page first.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    pictures, narrow = list(draw(study, WIDE)), list(draw(study, NARROW))
    encoded = msgspec.json.format(msgspec.json.encode(study), indent=1)
    shown = {
        picture.name: {"alt": picture.alt, "wide": _base64(picture), "narrow": _base64(other)}
        for picture, other in zip(pictures, narrow, strict=True)
    }
    files = {
        PAGE: _page(study, shown, encoded.decode()).encode(),
        NUMBERS: encoded + b"\n",
        **({} if settings is None else {RECOMMENDED: settings.encode()}),
        **{f"{picture.name}.png": picture.encoded("png") for picture in pictures},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            with replacing(folder / name) as file:
                file.write(content)
    except OSError as error:
        raise ConfigurationError(f"{folder}: cannot be written: {error.strerror}") from error
    return [folder / name for name in files]


def findings(study: Study) -> Iterator[str]:
    """The conclusions that the measurement supports, a sentence each."""
    if study.dtype_study is not None:
        yield from _dtype_findings(study.dtype_study)
    for dtype, one in study.one_rank.items():
        yield (
            f"Whole on one rank, {dtype} answers {study.batch_size} samples in {_ms(one.latency_s.median)} ms "
            f"({_ms(one.latency_s.low)}–{_ms(one.latency_s.high)} beside the placements) and holds "
            f"{size_text(one.largest_rank_bytes)}."
        )
    first = next(iter(study.one_rank), None)
    for verdict in study.verdicts:
        if verdict.dtype == first:
            yield _fastest(study, verdict)
            if verdict.measure == IN_ONE_PROCESS and (advice := _advice(study, verdict)):
                yield advice
    placed = [placement.over_one_rank for placement in study.placements if placement.error is None]
    if placed and all(ratio.low > 1 for ratio in placed):
        yield "In one process every sharding is slower than one rank: shard only tables that do not fit."
    elif placed and all(ratio.high >= 1 for ratio in placed):
        yield "In one process no sharding is certainly faster than one rank: shard only tables that do not fit."


def _dtype_findings(study: DtypeStudy) -> Iterator[str]:
    exact = study.bundles["fp32"].bytes
    best, choosing = study.recommended, study.choosing
    start = (
        f"Recommended dtypes: {_by_dtype(best)}: {size_text(best.measured.bytes)}, "
        f"{best.measured.bytes / exact:.0%} of FP32."
    )
    if best.held_out is None or study.held_out is None:
        yield (
            f"{start} {_loss(best.measured)}; the trained model's is {_score(choosing.trained_auc)}, on "
            f"{choosing.rows:,} labelled rows. Nothing smaller is recommended: {study.reason}."
        )
    else:
        yield (
            f"{start} {_loss(best.held_out)}; the trained model's is {_score(study.held_out.trained_auc)}, on "
            f"{study.held_out.rows:,} held-out rows. The other {choosing.rows:,} rows chose it. On these it loses "
            f"{_interval(best.measured)} and keeps to {study.max_auc_loss:g}; {study.reason}."
        )
    for bundle in study.contradicted:
        if bundle.held_out is not None:
            yield (
                f"Not recommended: {_by_dtype(bundle)}: {size_text(bundle.measured.bytes)}. It loses "
                f"{_interval(bundle.measured)} on the choosing rows, but {_interval(bundle.held_out)} on the "
                "held-out rows."
            )
    on = "" if study.held_out is None else " on the choosing rows"
    for dtype, measured in study.bundles.items():
        if dtype != "fp32":
            yield f"All tables as {dtype}: {size_text(measured.bytes)}. {_loss(measured)}{on}."


def _by_dtype(bundle: MeasuredBundle) -> str:
    """The tables of a bundle by their dtype."""
    tables: dict[str, list[str]] = {}
    for table, dtype in bundle.dtypes.items():
        tables.setdefault(dtype, []).append(table)
    return ", ".join(f"{dtype} for {_listed(names)}" for dtype, names in tables.items())


def _loss(measured: Measured) -> str:
    return f"AUC {measured.auc.auc:.5f}, a loss of {_interval(measured)}"


def _interval(measured: Measured) -> str:
    loss = measured.auc
    return f"{_score(loss.loss)} ({_score(loss.low)} to {_score(loss.high)})"


def _fastest(study: Study, verdict: Verdict) -> str:
    best, *tied = verdict.fastest
    placements = _group(study, verdict)[best]
    where = "in one process" if verdict.measure == IN_ONE_PROCESS else "side by side, before the network,"
    remark = f"; {_listed(tied)} took as long within the error of measurement" if tied else ", less than any other"
    return (
        f"On {verdict.ranks} ranks {where} {best} took {_times(placements, verdict)} one rank's time{remark}. Its "
        f"fullest rank holds {size_text(placements.largest_rank_bytes)}, "
        f"a batch moves {size_text(placements.traffic_bytes)}."
    )


def _advice(study: Study, verdict: Verdict) -> str | None:
    """A sentence on the recommended types. None: they were not measured together."""
    group = _group(study, verdict)
    if MIXED not in group:
        return None
    start = f"On {verdict.ranks} ranks {MIXED}, the types below,"
    if verdict.fastest == [MIXED]:
        return f"{start} is the fastest: take it."
    if MIXED in verdict.fastest:
        return f"{start} is among the fastest, whose times do not differ significantly."
    best = verdict.fastest[0]
    return (
        f"{start} is not recommended for speed: it took {_times(group[MIXED], verdict)} one rank's time, {best} "
        f"{_times(group[best], verdict)}."
    )


def _group(study: Study, verdict: Verdict) -> dict[str, Placement]:
    """The placements that a verdict is about, by strategy."""
    return {
        placement.strategy: placement
        for placement in study.placements
        if placement.error is None and (placement.ranks, placement.dtype) == (verdict.ranks, verdict.dtype)
    }


def _times(placement: Placement, verdict: Verdict) -> str:
    figure = figure_of(placement, verdict.measure)
    return f"{figure.median:.2f} ({figure.low:.2f}–{figure.high:.2f}) times"


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _page(study: Study, pictures: dict[str, dict[str, str]], encoded: str) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.ChainableUndefined
    )
    environment.filters |= {
        "ms": _ms,
        "bytes": _bytes,
        "ratio": _ratio,
        "unbroken": _unbroken,
        "error": error_text,
        "score": _score,
    }
    return environment.get_template("page.html").render(
        study=study,
        ms=_ms,
        ratio=_ratio,
        pictures=pictures,
        findings=list(findings(study)),
        fastest={(verdict.measure, verdict.ranks, verdict.dtype): verdict.fastest for verdict in study.verdicts},
        floats=sum(4 * table.rows * table.dim for table in study.tables.values()),
        first_dtype=next(iter(study.one_rank), None),
        most_tables=MOST_TABLES,
        made_at=datetime.fromtimestamp(study.made_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        # "</script>" in a table's name must not end the element.
        json=Markup(json.dumps(json.loads(encoded)).replace("<", "\\u003c")),  # noqa: S704
    )


def _base64(picture: Picture) -> str:
    return base64.b64encode(picture.encoded("svg")).decode()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _ratio(number: float) -> str:
    return f"{number:.2f}"


def _unbroken(text: str) -> str:
    """`text`, where no line can break between a number of bytes and its unit."""
    return re.sub(r"(\d) ([kMGT]?B\b)", "\\1\N{NO-BREAK SPACE}\\2", text)


def _bytes(size_bytes: int) -> str:
    return _unbroken(size_text(size_bytes))


def _score(number: float) -> str:
    return f"{round(number, 5) + 0.0:.5f}"  # no -0.00000
