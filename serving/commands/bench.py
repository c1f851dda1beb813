"""`tbe-serve bench`: throughput and latency of a served model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.table import Table

from serving.bundle import Bundle, open_bundle
from serving.client import LookupClient, ModelInfo
from serving.commands.terminal import DEFAULT_URL, TlsOf, UrlOption, say, takes_tls
from serving.errors import BundleError, InvalidRequest
from serving.load.generator import Load, generate
from serving.load.ids import Distribution, random_requests
from serving.load.report import PERCENTILES, Figure, Report, refusal, summarize
from serving.load.requests import Prepared, captured_requests, prepare
from serving.terminal import out

_CLIENTS = (1, 8, 32)
_SAMPLES = (1,)
# Of anything: seconds, clients, samples, requests a second.
_MOST = 1_000_000


class Refusal(msgspec.Struct, frozen=True):
    """A load that was measured, and why its numbers are not told."""

    clients: int
    rate: float
    samples: int | None
    refused: str


@takes_tls
def bench(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    tls: TlsOf,
    url: UrlOption = DEFAULT_URL,
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="The version that is served, REPOSITORY/NAME/VERSION: its tables say which ids there are, and "
            "its rows what the answers should be."
        ),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Send the requests of this captured file instead of random ones.")
    ] = None,
    samples: Annotated[
        list[int] | None, typer.Option(help="Samples of a random request; may be given again.")
    ] = None,
    ids: Annotated[
        str, typer.Option(help="How often each id is asked for: uniform, or zipf:EXPONENT such as zipf:1.05.")
    ] = "uniform",
    pooling_factor: Annotated[
        list[str] | None,
        typer.Option(metavar="[FEATURE=]X", help="Ids in a bag, of all features or of one; 10 by default."),
    ] = None,
    clients: Annotated[
        list[int] | None, typer.Option(help="How many at once, each waiting for its answer, 1, 8 and 32 by default.")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Instead: requests a second, at random moments, whether or not others are answered."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long each repeat takes.")] = 3.0,
    repeats: Annotated[int, typer.Option(help="How many; the report says how far they lie apart.")] = 5,
    warm_up: Annotated[float, typer.Option(help="Seconds of load before the first repeat, not counted.")] = 1.0,
    check: Annotated[float, typer.Option(help="The share of answers that is compared with --bundle.")] = 0.01,
    max_errors: Annotated[
        float, typer.Option(help="The share of requests that may fail; if more do, the command fails.")
    ] = 0.01,
    processes: Annotated[int, typer.Option(help="How many send, for servers faster than one can.")] = 1,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each request, in seconds.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line for each load.")] = False,
) -> None:
    """Measure throughput and latency of a running server, and check its answers meanwhile.

    Exits with 1 where nothing was answered, more failed than --max-errors, an answer was wrong, or this generator was
    the bottleneck.
    """
    _check_positive(seconds=[seconds], repeats=[repeats], processes=[processes], timeout_s=[timeout_s])
    _check_positive(samples=samples or (), clients=clients or (), rate=rate or ())
    if not 0 <= check <= 1:
        raise InvalidRequest(f"check: expected a share in [0, 1], got {check}")
    if not 0 <= max_errors <= 1:
        raise InvalidRequest(f"max_errors: expected a share in [0, 1], got {max_errors}")
    if not 0 <= warm_up <= _MOST:
        raise InvalidRequest(f"warm_up: expected 0 to {_MOST} seconds, got {warm_up}")
    distribution = Distribution.parse(ids)
    factors = [_pooling_factor(each) for each in pooling_factor or ()]
    opened = None if bundle is None else open_bundle(bundle)
    spoken = tls()
    with LookupClient(url, model, 10, tls=spoken) as client:
        info = client.info()
    if opened is not None and opened.manifest.contract != info.contract:
        raise BundleError(f"{bundle}: expected a version of the model that is served, {model!r}: features differ")
    pooling = _pooling_factors(factors, info)
    asked = _requests(model, info, opened, replay, samples or _SAMPLES, distribution, pooling)
    loads = [
        Load(
            clients=each_clients,
            rate=each_rate,
            seconds=seconds,
            repeats=repeats,
            warm_up_s=warm_up,
            check=check,
        )
        for each_clients, each_rate in (
            [(0, each) for each in rate] if rate else [(each, 0.0) for each in clients or _CLIENTS]
        )
    ]
    found: list[Report | Refusal] = []
    for size, requests in asked:
        for load in loads:
            runs = generate(url, requests, load, timeout_s, opened, processes, spoken)
            why = refusal(load, runs)
            found.append(summarize(load, size, runs) if why is None else Refusal(load.clients, load.rate, size, why))
            if as_json:
                print(msgspec.json.encode(found[-1]).decode(), flush=True)
    reports = [each for each in found if isinstance(each, Report)]
    if not as_json and reports:
        out.print(_table(reports))
        out.print(_summary(reports))
    if opened is None:
        say("the answers were not checked: --bundle says what they should be")
    for each in found:
        if isinstance(each, Refusal):
            say(f"{_named(each)}: refused: {each.refused}")
    failed = [report for report in reports if report.failed > max_errors or not report.answers]
    for report in failed:
        say(f"{_named(report)}: {_errors(report, max_errors)}")
    raise typer.Exit(len(reports) < len(found) or bool(failed))


def _errors(report: Report, most: float) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.errors.items()) or "no answer"
    return f"{report.failed:.1%} of the requests failed, more than the {most:.1%} of --max-errors: {kinds}"


def _check_positive(**numbers: Sequence[float]) -> None:
    for name, given in numbers.items():
        for number in given:
            if not 0 < number <= _MOST:
                raise InvalidRequest(f"{name}: expected > 0 and at most {_MOST}, got {number}")


def _requests(
    model: str,
    info: ModelInfo,
    bundle: Bundle | None,
    replay: Path | None,
    samples: Sequence[int],
    ids: Distribution,
    pooling: Mapping[str, float],
) -> list[tuple[int | None, list[Prepared]]]:
    """The requests to send, by their number of samples; None for those that were captured."""
    if replay is not None:
        captured, left_out = captured_requests(replay, info)
        if left_out:
            say(f"{replay}: {left_out} of {left_out + len(captured)} requests are malformed and are not sent")
        return [(None, prepare(model, captured, info))]
    if bundle is None:
        raise InvalidRequest("expected --bundle, or --replay: where else are ids to come from?")
    return [(size, prepare(model, random_requests(bundle.manifest, size, ids, pooling), info)) for size in samples]


def _pooling_factor(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        factor = float(number)
    except ValueError:
        factor = -1.0
    if not 0 <= factor < 1e6:
        raise InvalidRequest(f"pooling_factor {text!r}: expected [FEATURE=]X with X in [0, 1000000)")
    return name, factor


def _pooling_factors(given: Sequence[tuple[str, float]], info: ModelInfo) -> dict[str, float]:
    factors = dict.fromkeys(info.keys, 10.0)
    for name, factor in given:
        if name and name not in factors:
            raise InvalidRequest(f"pooling_factor {name!r}: expected one of {', '.join(map(repr, factors))}")
        factors |= {name: factor} if name else dict.fromkeys(factors, factor)
    return factors


def _named(load: Report | Refusal) -> str:
    who = f"{load.clients}" if load.clients else f"{load.rate:g}/s"
    return who if load.samples is None else f"{load.samples} × {who}"


def _table(reports: Sequence[Report]) -> Table:
    first = reports[0]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    load = "clients" if first.clients else "requests"
    table.add_column(load if first.samples is None else f"samples × {load}", no_wrap=True)
    latencies = [f"p{percent:g}" for percent in PERCENTILES]
    for name in ("answers\n/s", "samples\n/s", "ids\n/s", *(f"{name}\nms" for name in latencies)):
        table.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        rates = (report.answers_per_s, report.samples_per_s, report.ids_per_s)
        times = [report.latency_s.get(name) for name in latencies]
        table.add_row(
            _named(report),
            *(_rate(each.median) for each in rates),
            *("–" if each is None else f"{1e3 * each.median:.2f}" for each in times),
        )
        table.add_row("", *(_spread(each, report.repeats) for each in (*rates, *times)), style="dim")
    return table


def _spread(figure: Figure | None, repeats: int) -> str:
    if figure is None or repeats == 1:
        return ""
    return "unclear" if figure.spread is None else f"± {figure.spread:.0%}"


def _summary(reports: Sequence[Report]) -> str:
    first = reports[0]
    lines = [f"One run of {first.seconds:g} s, which says nothing of how far others lie apart."]
    if first.repeats > 1:
        lines = [
            f"Medians of {first.repeats} runs of {first.seconds:g} s, and half the distance between the extremes,",
            f"which hold the median with {first.confidence:.0%} confidence; unclear if as much as the median.",
        ]
    if checked := sum(each.checked for each in reports):
        answers = sum(each.answers for each in reports)
        lines.append(f"{checked:,} of {answers:,} answers were compared with the bundle's rows: all right.")
    errors = sum((Counter(each.errors) for each in reports), Counter[str]())
    lines.append(f"Errors: {', '.join(f'{count:,} {kind}' for kind, count in errors.items()) or 'none'}.")
    return "\n".join(lines)


def _rate(per_s: float) -> str:
    """A thousand as 1.00 k."""
    for size, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if per_s >= size:
            return f"{per_s / size:.3g}{prefix}"
    return f"{per_s:.3g}"
