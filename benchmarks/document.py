"""docs/benchmarks.md from the results of a run: the numbers are the run's, the words are of document.md.j2."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from benchmarks.peers_served import LOADS, PEERS
from serving.bundle.plan import ShardingType
from serving.files.replacing import replacing

TEMPLATE = "document.md.j2"
DOCS = Path(__file__).parent.parent / "docs"
WORKLOADS = {
    "dlrm_1m": "DLRM-v2, rows capped at 1 M",
    "dlrm_10m": "DLRM-v2, rows capped at 10 M",
    "wide": "100 one-hot features of dim 16",
    "movielens": "MovieLens",
}
CURVES = {"samples": "samples", "ids_a_bag": "ids in a bag", "tables": "tables", "rows": "rows"}


def write(results: Path) -> Path:
    """Write the page and its picture; the page's path."""
    run = json.loads(results.read_text())
    draw(run["results"]).savefig(DOCS / "curves.png", dpi=130)
    page = DOCS / "benchmarks.md"
    with replacing(page) as file:
        file.write(render(run, results.resolve().name).encode())
    return page


def render(run: dict[str, Any], file: str) -> str:
    """The page.

    Args:
        run: a file of results, and its name.

    Raises:
        jinja2.UndefinedError: the run has no number of a name that the template asks for.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown
    )
    environment.filters |= {"ms": _ms, "rate": _rate, "ratio": _ratio, "bytes": _bytes}
    candidates = {"ours": "**ours**", "donothing": "a model that does nothing"}
    return environment.get_template(TEMPLATE).render(
        run=run,
        file=file,
        got=run["results"],
        ratios=run["ratios"],
        workloads=WORKLOADS,
        candidates=candidates | {name: name.replace("_", " ") for name in PEERS},
        ahead=list(_ahead(run["results"])),
        curves=CURVES,
        points={name: _points(run["results"], name) for name in CURVES},
        kinds=[kind.value for kind in ShardingType],
    )


def draw(got: dict[str, float]) -> Figure:
    """What costs what as it grows, a panel each."""
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    for axes, (name, shown) in zip(figure.subplots(1, len(CURVES), sharey=True), CURVES.items(), strict=True):
        values, seconds = zip(*_points(got, name), strict=True)
        axes.loglog(values, [1e3 * each for each in seconds], marker="o", color="#0072B2")
        axes.set_xlabel(shown)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("p50 in ms")
    figure.axes[0].yaxis.set_major_formatter("{x:g}")
    return figure


def _ahead(got: dict[str, float]) -> Iterator[str]:
    """A line for each load of each workload on which others are ahead of ours."""
    for name, title in WORKLOADS.items():
        for samples, clients in LOADS:
            key = "p50_s" if clients == 1 else "rps"
            ours = got[f"{name}_ours_c{clients}_b{samples}_{key}"]
            found = {peer: got.get(f"{name}_{peer}_c{clients}_b{samples}_{key}") for peer in PEERS}
            better = {
                peer: ours / value if clients == 1 else value / ours
                for peer, value in found.items()
                if value is not None and (value < ours if clients == 1 else value > ours)
            }
            if better:
                what = "p50, 1 client" if clients == 1 else f"answers/s, {clients} clients"
                who = ", ".join(f"{peer.replace('_', ' ')} by {by:.2f}" for peer, by in better.items())
                yield f"{title}, B = {samples}, {what}: {who}"


def _points(got: dict[str, float], curve: str) -> list[tuple[int, float]]:
    prefix, suffix = f"curve_{curve}_", "_p50_s"
    found = [key for key in got if key.startswith(prefix) and key.endswith(suffix)]
    return sorted((int(key.removeprefix(prefix).removesuffix(suffix)), got[key]) for key in found)


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
