"""`tbe-serve bench`: throughput and latency of a served model."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from serving.bench.generator import generate
from serving.bench.report import Refusal, Report, named, refusal, summarize, summary, table
from serving.client import LookupClient
from serving.commands.connection import DEFAULT_URL, TlsOf, UrlOption, say, takes_tls
from serving.commands.traffic import (
    SourceOf,
    TrafficOf,
    check_positive,
    check_share,
    takes_source,
    takes_traffic,
)
from serving.terminal.program import out

_INFO_TIMEOUT_S = 10


@takes_tls
@takes_traffic
@takes_source
def bench(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    source: SourceOf,
    traffic: TrafficOf,
    tls: TlsOf,
    url: UrlOption = DEFAULT_URL,
    max_errors: Annotated[
        float, typer.Option(help="Largest share of failed requests. If more fail, the command fails.")
    ] = 0.01,
    processes: Annotated[
        int, typer.Option(help="Processes that send requests, for servers that are faster than one process.")
    ] = 1,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each request, in seconds.")] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON for each number of clients, or rate.")
    ] = False,
) -> None:
    """Measure throughput and latency of a running server, and check its answers.

    Exits with 1 if no request was answered, more requests failed than --max-errors, an answer was wrong, or this
    generator was the bottleneck.
    """
    check_positive(processes=[processes], timeout_s=[timeout_s])
    check_share(max_errors=max_errors)
    asked, planned, security = source(), traffic(), tls()
    with LookupClient(url, model, _INFO_TIMEOUT_S, tls=security) as client:
        info = client.info()
    outcomes: list[Report | Refusal] = []
    for samples, requests in asked.requests(model, info):
        for each in planned:
            repeats = generate(url, requests, each, timeout_s, asked.bundle, processes, security)
            why = refusal(each, repeats)
            outcomes.append(
                summarize(each, samples, repeats) if why is None else Refusal(each.clients, each.rate, samples, why)
            )
            if as_json:
                print(msgspec.json.encode(outcomes[-1]).decode(), flush=True)
    reports = [each for each in outcomes if isinstance(each, Report)]
    if not as_json and reports:
        out.print(table(reports))
        out.print(summary(reports))
    if asked.bundle is None:
        say("the answers were not checked: --bundle says what they should be")
    raise typer.Exit(_has_failed(outcomes, max_errors))


def _has_failed(outcomes: Sequence[Report | Refusal], max_errors: float) -> bool:
    """Print a line for each failure. Returns whether there was one."""
    refused = [each for each in outcomes if isinstance(each, Refusal)]
    for each in refused:
        say(f"{named(each)}: refused: {each.refused}")
    failed = [
        each for each in outcomes if isinstance(each, Report) and (each.failed > max_errors or not each.answers)
    ]
    for report in failed:
        say(f"{named(report)}: {_errors(report, max_errors)}")
    return bool(refused or failed)


def _errors(report: Report, most: float) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.errors.items()) or "no answer"
    return f"{report.failed:.1%} of the requests failed, more than the {most:.1%} of --max-errors: {kinds}"
