"""docs/benchmarks.md from the results of a run: the numbers are the run's, the words are of document.md.j2."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from benchmarks import (
    batch,
    beyond_memory,
    columns,
    fresh,
    instances,
    pages,
    peers_scores,
    rankings,
    rankings_workload,
    scores_sequences,
    sequences,
    stages,
    switching,
    threads,
)
from benchmarks.peer_servers import PEERS
from benchmarks.peers_hosts import CASE as HOSTS_CASE
from benchmarks.peers_hosts import PEERS as HOSTS_PEERS
from benchmarks.peers_served import LOADS
from benchmarks.routed import ALL as CASES
from benchmarks.routed import Case
from benchmarks.scores_model import WIDTH
from serving.bundle.plan import ShardingType
from serving.files import replacing

TEMPLATE = "document.md.j2"
DOCS = Path(__file__).parent.parent / "docs"
WORKLOADS = {
    "dlrm_1m": "DLRM-v2, rows capped at 1 M",
    "dlrm_10m": "DLRM-v2, rows capped at 10 M",
    "wide": "100 one-hot features of dim 16",
    "movielens": "MovieLens",
}
# The models of rankings: as they are called there, and the aims in process and beside other servers.
RANKINGS = {"din": ("DIN", 2.5, 2), "towers": ("two towers", 3, 2), "dcn": ("DLRM_DCN", 1.5, 1.4)}
# Of the picture of routers: results, how they are called there, and their colour.
HOSTS_LINES = {
    "routed": ("through a router", "#D55E00"),
    "apart": ("the same, each server\non its own machine", "#009E73"),
    "engine": ("Engine, no router", "#0072B2"),
    "one_host": ("one server, no hosts", "#777777"),
}
CURVES = {"samples": "samples", "ids_a_bag": "ids in a bag", "tables": "tables", "rows": "rows"}


def write(results: Path) -> Path:
    """Write the page and its picture; the page's path."""
    run = json.loads(results.read_text())
    draw(run["results"]).savefig(DOCS / "curves.png", dpi=130)
    if cases := _measured(run["results"]):
        draw_hosts(run["results"], cases).savefig(DOCS / "hosts.png", dpi=130)
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
    environment.filters |= {"ms": _ms, "rate": _rate, "ratio": _ratio, "bytes": _bytes, "share": _share, "us": _us}
    candidates = {"ours": "**ours**", "donothing": "a model that does nothing"}
    return environment.get_template(TEMPLATE).render(
        run=run,
        file=file,
        got=run["results"],
        ratios=run["ratios"],
        workloads=WORKLOADS,
        candidates=candidates | {name: name.replace("_", " ") for name in PEERS},
        loads=LOADS,
        ahead=[
            f"{title}, {line}"
            for name, title in WORKLOADS.items()
            for line in _ahead(run["results"], name, LOADS, PEERS)
        ],
        dense_width=WIDTH,
        rankings=rankings,
        rankings_workload=rankings_workload,
        rank_kinds={
            kind: about for kind, about in RANKINGS.items() if f"rank_{kind}_ours_once_p50_s" in run["results"]
        },
        rank_candidates={
            "ours_once": "**ours**, shared",
            "ours_repeated": "ours, repeated",
            f"{rankings.PEER}_once": "grpc.aio, looked up once and expanded",
            f"{rankings.PEER}_repeated": "grpc.aio, repeated",
        },
        sequences=sequences,
        scores_sequences=scores_sequences,
        stages=stages.SHOWN,
        stage_models=stages.MODELS,
        columns=columns,
        batch=batch,
        threads=threads,
        fresh=fresh,
        instances=instances,
        pages=pages,
        switching=switching,
        beyond=beyond_memory,
        interval=partial(_interval, run),
        scores_candidates=candidates | {name: name.replace("_", " ") for name in peers_scores.SERVERS},
        scores_loads=peers_scores.LOADS,
        scores_ahead=list(_ahead(run["results"], peers_scores.NAME, peers_scores.LOADS, peers_scores.SERVERS)),
        curves=CURVES,
        points={name: _points(run["results"], name) for name in CURVES},
        kinds=[kind.value for kind in ShardingType],
        routed=_measured(run["results"]),
        hosts_case=HOSTS_CASE,
        hosts_peers=HOSTS_PEERS,
        hosts_ahead=list(_ahead_of_router(run["ratios"])),
    )


def _interval(run: dict[str, Any], name: str) -> str:
    """A ratio, and the least and the largest of its repeats where there were some."""
    spread = run.get("spreads", {}).get(name)
    shown = _ratio(run["ratios"][name])
    return shown if spread is None else f"{shown} ({_ratio(spread[0])} to {_ratio(spread[1])})"


def draw(got: dict[str, float]) -> Figure:
    """What costs what as it grows, a panel each."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    figure.suptitle("p50 of a lookup in process, as one of four things grows", x=0.01, ha="left")
    for axes, (name, shown) in zip(figure.subplots(1, len(CURVES), sharey=True), CURVES.items(), strict=True):
        values, seconds = zip(*_points(got, name), strict=True)
        axes.loglog(values, [1e6 * second for second in seconds], marker="o", color="#0072B2")
        axes.set_xlabel(shown)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("p50 in µs")
    return figure


def draw_hosts(got: dict[str, float], cases: Sequence[Case]) -> Figure:
    """What a routed lookup takes, by hosts: a row for each number of samples, a column for each placement."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    figure.suptitle("p50 of a lookup whose tables are on 1 to 8 hosts, one client", x=0.01, ha="left")
    kinds = [kind for kind in ("table_wise", "row_wise") if any(case.kind == kind for case in cases)]
    for samples, panels in zip((1, 128), figure.subplots(2, len(kinds), sharey="row", squeeze=False), strict=True):
        for axes, kind in zip(panels, kinds, strict=True):
            hosts = [case.hosts for case in cases if case.kind == kind]
            lines = {
                line: [1e3 * got[f"{line}_{kind}_{host}_p50_b{samples}_s"] for host in hosts] for line in HOSTS_LINES
            }
            _draw_lines(axes, hosts, lines)
            axes.set_title(f"{samples} sample{'s' * (samples > 1)}, {kind}", loc="left", fontsize=10)
            axes.set_xticks(sorted({case.hosts for case in cases}))
        panels[0].set_ylabel("ms")
    for axes in panels:
        axes.set_xlabel("hosts")
    return figure


def _draw_lines(axes: Axes, hosts: Sequence[int], lines: Mapping[str, Sequence[float]]) -> None:
    """A line for each way to ask, with its name at its end."""
    for line, times in lines.items():
        axes.plot(hosts, times, marker="o", markersize=4, color=HOSTS_LINES[line][1])
    axes.set_xlim(0.7, 1.55 * max(hosts))
    axes.set_ylim(0, 1.15 * max(axes.get_ylim()[1], *map(max, lines.values())))
    label_y = -1.0
    for line in sorted(lines, key=lambda line: lines[line][-1]):
        name, colour = HOSTS_LINES[line]
        # Names of lines that end close to one another stand one above the other.
        label_y = max(lines[line][-1], label_y + (0.1 + 0.05 * name.count("\n")) * axes.get_ylim()[1])
        axes.annotate(name, (max(hosts) + 0.2, label_y), va="center", fontsize=8, color=colour)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _measured(got: dict[str, float]) -> list[Case]:
    """The cases of routers that a run has."""
    return [case for case in CASES if f"routed_{case.name}_p50_b1_s" in got]


def _ahead(got: dict[str, float], name: str, loads: Sequence[tuple[int, int]], peers: Iterable[str]) -> Iterator[str]:
    """A line for each load of a workload on which others are ahead of ours."""
    for samples, clients in loads:
        key = "p50_s" if clients == 1 else "rps"
        ours = got.get(f"{name}_ours_c{clients}_b{samples}_{key}")
        if ours is None:
            continue
        figures = {peer: got.get(f"{name}_{peer}_c{clients}_b{samples}_{key}") for peer in peers}
        better = {
            peer: ours / value if clients == 1 else value / ours
            for peer, value in figures.items()
            if value is not None and (value < ours if clients == 1 else value > ours)
        }
        if better:
            what = "p50, 1 client" if clients == 1 else f"answers/s, {clients} clients"
            who = ", ".join(f"{peer.replace('_', ' ')} by {by:.2f}" for peer, by in better.items())
            yield f"B = {samples}, {what}: {who}"


def _ahead_of_router(ratios: dict[str, float]) -> Iterator[str]:
    """A line for each number of samples at which others with tables on several hosts are ahead of a router."""
    for samples in (1, 128):
        by_peer = {shown: ratios.get(f"{peer}_over_routed_p50_b{samples}", 1) for peer, shown in HOSTS_PEERS.items()}
        if better := {peer: ratio for peer, ratio in by_peer.items() if ratio < 1}:
            yield f"B = {samples}: " + ", ".join(f"{peer} by {1 / ratio:.2f}" for peer, ratio in better.items())


def _points(got: dict[str, float], curve: str) -> list[tuple[int, float]]:
    prefix, suffix = f"curve_{curve}_", "_p50_s"
    names = [key for key in got if key.startswith(prefix) and key.endswith(suffix)]
    return sorted((int(key.removeprefix(prefix).removesuffix(suffix)), got[key]) for key in names)


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.2f} ms" if milliseconds < 10 else f"{milliseconds:,.1f} ms"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}"


def _ratio(number: float) -> str:
    return f"{number:.2f}"


def _share(number: float) -> str:
    return f"{number:.0%}".replace("%", " %")


def _bytes(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"
