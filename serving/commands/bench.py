"""`tbe-serve bench`: throughput and latency of a served model."""

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from serving.bundle import open_bundle
from serving.capture import read_captured
from serving.client import AsyncLookupClient, ModelInfo
from serving.commands.terminal import DEFAULT_URL, UrlOption, fail, out, say
from serving.encoding import Features
from serving.errors import InvalidRequest, ServingError
from serving.load_generator import Report, closed_loop, features_of, open_loop, random_requests


def bench(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    url: UrlOption = DEFAULT_URL,
    replay: Annotated[Path | None, typer.Option(help="Send the requests of this captured file.")] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Send random ids within the tables of this version: REPOSITORY/NAME/VERSION.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples of a random request.")] = 1,
    ids: Annotated[int, typer.Option(help="Ids of a random request's bags.")] = 10,
    clients: Annotated[
        list[int] | None, typer.Option(help="How many at once, each waiting for its answer; may be given again.")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Instead: requests a second, at random moments, whether or not others are answered."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long each of these.")] = 5.0,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each request, in seconds.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Measure throughput and latency of a running server; exits with 1 if nothing was answered."""

    async def measure() -> list[tuple[str, Report]]:
        async with AsyncLookupClient(url, model, timeout_s) as client:
            requests = _requests(await client.info(), replay, bundle, samples, ids)
            loops = [(f"{rate_:g}/s", open_loop(client, requests, rate_, seconds)) for rate_ in rate or ()]
            if not rate:
                loops = [
                    (f"{each} client{'s' * (each > 1)}", closed_loop(client, requests, each, seconds))
                    for each in clients or (1, 8, 32)
                ]
            return [(name, await loop) for name, loop in loops]

    try:
        results = asyncio.run(measure())
    except ServingError as error:
        fail(error)
    if as_json:
        for name, report in results:
            print(msgspec.json.encode({"load": name, **_numbers(report)}).decode())
    else:
        out.print(_table(results))
    raise typer.Exit(not all(report.latencies_s for _, report in results))


def _requests(info: ModelInfo, replay: Path | None, bundle: Path | None, samples: int, ids: int) -> list[Features]:
    if (replay is None) == (bundle is None):
        raise InvalidRequest("expected one of --replay and --bundle")
    if bundle is not None:
        manifest = open_bundle(bundle).manifest
        tables = zip(manifest.features, manifest.feature_tables, strict=True)
        return random_requests({feature.name: table.rows for feature, table in tables}, info, samples, ids)
    requests, skipped = [], 0
    for captured in read_captured(replay):  # type: ignore[arg-type]
        try:
            requests.append(features_of(captured.tensors, info))
        except InvalidRequest:
            skipped += 1  # no client of ours can send it
    if skipped:
        say(f"{replay}: {skipped} of {skipped + len(requests)} requests are malformed and are not sent")
    if not requests:
        raise InvalidRequest(f"{replay}: expected requests, found none that can be sent")
    return requests


def _numbers(report: Report) -> dict[str, object]:
    return {
        "answers_per_s": report.answers_per_s,
        "p50_s": report.percentile_s(50),
        "p90_s": report.percentile_s(90),
        "p99_s": report.percentile_s(99),
        "errors": dict(report.errors),
    }


def _table(results: list[tuple[str, Report]]) -> Table:
    table = Table("load", "answers/s", "p50", "p90", "p99", "errors")
    for name, report in results:
        latencies = [f"{1e3 * report.percentile_s(percent):.2f} ms" for percent in (50, 90, 99)]
        errors = ", ".join(f"{count} {kind}" for kind, count in report.errors.items())
        table.add_row(name, f"{report.answers_per_s:,.0f}", *latencies, errors or "none")
    return table
