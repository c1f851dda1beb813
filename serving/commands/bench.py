"""`tbe-serve bench`: measure throughput and latency of a served model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from serving.bench.generator import Traffic, generate
from serving.bench.report import Refusal, Report, costs, named, refusal, summarize, summary, table
from serving.bench.requests import Distribution, Prepared, captured_requests, prepare, random_requests
from serving.bundle.load import Bundle, open_bundle
from serving.client import LookupClient, ModelInfo
from serving.commands.connection import DEFAULT_URL, TlsOf, UrlOption, say, takes_tls
from serving.errors import BundleError, ConfigurationError
from serving.requests.captured import SkippedLines
from serving.requests.id_maps import IdMaps, known_of_keys
from serving.requests.types import Tensors
from serving.terminal.app import out
from serving.terminal.options import EVERY, as_given, by_name, real, shared_options
from serving.terminal.output import print_json

_INFO_TIMEOUT_S = 10
_CLIENTS = (1, 8, 32)
_SAMPLES = (1,)
_POOLING_FACTOR = 10.0
# The largest value for seconds, clients, samples, and requests a second.
_MOST = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where requests come from: random requests for a bundle, or a captured file.

    Attributes:
        bundle: the served version. None: answers are not checked, and `replay` is required.
        replay: a captured file. None: random requests.
        samples: numbers of samples of random requests, each measured separately.
        ids: the distribution of ids.
        pooling_factors: mean number of ids in a bag, by feature. "*" is for all features.
        scores: whether random requests are for scores.
        items: numbers of items that random requests rank for one user, each measured separately. The user side of
            the bundle is sent once.
    """

    bundle: Bundle | None
    replay: Path | None
    samples: Sequence[int]
    ids: Distribution
    pooling_factors: Mapping[str, float]
    scores: bool
    items: Sequence[int] = ()

    def requests(self, model: str, info: ModelInfo) -> list[tuple[int | None, list[Prepared]]]:
        """Lists of requests for a served model, each with the samples of its requests, or None if these differ.

        Raises:
            BundleError: the bundle is not a version of this model.
            ConfigurationError: there are no requests to send.
        """
        if self.bundle is not None and self.bundle.manifest.schema_digest != info.schema_digest:
            raise BundleError(
                f"{self.bundle.path}: expected a version of the served model, {model!r}: features differ"
            )
        factors = self._factors(info)
        if self.replay is not None:
            if self.scores or self.items:
                raise ConfigurationError("scores: expected random requests: replayed requests keep their own outputs")
            return [(None, prepare(model, _captured(self.replay, info), info))]
        if self.bundle is None:
            raise ConfigurationError("expected --bundle or --replay, got neither: requests need ids")
        manifest = self.bundle.manifest
        shared = _user_side_of(self.bundle) if self.items else ()
        maps = IdMaps.of(self.bundle.path, manifest)
        known_ids = known_of_keys({} if maps is None else maps.known, manifest)
        draw = partial(
            random_requests,
            ids=self.ids,
            pooling_factors=factors,
            known_ids=known_ids,
            scores=self.scores,
            shared=shared,
        )
        return [(size, prepare(model, draw(manifest, size), info)) for size in self.items or self.samples]

    def _factors(self, info: ModelInfo) -> dict[str, float]:
        factors = dict.fromkeys(info.keys, _POOLING_FACTOR)
        for name, factor in self.pooling_factors.items():
            if name != EVERY and name not in factors:
                raise ConfigurationError(f"pooling_factor {name!r}: expected one of {', '.join(map(repr, factors))}")
            factors |= dict.fromkeys(factors if name == EVERY else [name], factor)
        return factors


def _source(
    *,
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="The served version, REPOSITORY/NAME/VERSION. Random ids are valid for its tables, and answers are "
            "checked with its rows and dense part."
        ),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Send the requests of a captured file instead of random requests.")
    ] = None,
    samples: Annotated[
        list[int] | None, typer.Option(help="Samples in each random request. May be repeated.")
    ] = None,
    ids: Annotated[
        str, typer.Option(help="Distribution of ids: uniform, or zipf:EXPONENT such as zipf:1.05.")
    ] = "uniform",
    pooling_factor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[FEATURE=]X", help="Mean number of ids in a bag, for all features or for one. Default: 10."
        ),
    ] = None,
    scores: Annotated[
        bool,
        typer.Option("--scores", help="Request scores, with random dense inputs in [0, 1), instead of embeddings."),
    ] = False,
    items: Annotated[
        list[int] | None,
        typer.Option(
            help="With --scores, instead of --samples: items that each random request ranks for one user. The "
            "features of --user-side are sent once. May be repeated."
        ),
    ] = None,
) -> Source:
    _check_positive(samples=samples or (), items=items or ())
    if items and not scores:
        raise ConfigurationError("items (--items): expected --scores beside it: items are ranked by scores")
    if items and samples:
        raise ConfigurationError("items (--items): expected no --samples beside it: an item is a sample")
    return Source(
        replay=replay,
        samples=samples or _SAMPLES,
        ids=Distribution.parse(ids),
        pooling_factors={name: _factor(name, text) for name, text in by_name(pooling_factor).items()},
        bundle=None if bundle is None else open_bundle(bundle),
        scores=scores,
        items=items or (),
    )


def _user_side_of(bundle: Bundle) -> Sequence[str]:
    """The features and dense inputs that all items of a request share.

    Raises:
        ConfigurationError: the bundle names none.
    """
    part = bundle.manifest.dense_part
    if part is None or part.user_side is None:
        raise ConfigurationError(
            f"items (--items): expected a bundle with a user side: {bundle.path} has none: export it with --user-side"
        )
    return part.user_side.names


def _traffic(
    *,
    clients: Annotated[
        list[int] | None,
        typer.Option(
            help="Concurrent clients, each with one request at a time. May be repeated. Default: 1, 8 and 32."
        ),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Instead of --clients: requests per second, at random intervals. May be repeated."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Duration of each repeat, in seconds.")] = 3.0,
    repeats: Annotated[int, typer.Option(help="Number of repeats. The report shows their spread.")] = 5,
    warm_up: Annotated[float, typer.Option(help="Seconds of unmeasured warm-up before the first repeat.")] = 1.0,
    check: Annotated[float, typer.Option(help="Share of answers to check against --bundle.")] = 0.01,
) -> list[Traffic]:
    _check_positive(seconds=[seconds], repeats=[repeats], clients=clients or (), rate=rate or ())
    _check_share(check=check)
    if not 0 <= warm_up <= _MOST:
        raise ConfigurationError(f"warm_up: expected 0 to {_MOST} seconds, got {warm_up}")
    pairs = [(0, per_s) for per_s in rate] if rate else [(count, 0.0) for count in clients or _CLIENTS]
    return [
        Traffic(clients=count, rate=per_s, seconds=seconds, repeats=repeats, warm_up_s=warm_up, check=check)
        for count, per_s in pairs
    ]


SourceOf = Callable[[], Source]
TrafficOf = Callable[[], list[Traffic]]
# A command calls `source()` and `traffic()` for the values of these options.
takes_source = shared_options("source", _source)
takes_traffic = shared_options("traffic", _traffic)


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
        float, typer.Option(help="Maximum share of failed requests. If more fail, the command fails.")
    ] = 0.01,
    processes: Annotated[
        int, typer.Option(help="Processes that send requests. One may be slower than the server.")
    ] = 1,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each request, in seconds.")] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON for each number of clients or rate.")
    ] = False,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of the server for an hour. Prints what a million samples cost.")
    ] = None,
) -> None:
    """Measure throughput and latency of a running server, and check its answers.

    Exits with 1 if no request was answered, more requests failed than --max-errors, an answer was wrong, or this
    program was the bottleneck.
    """
    _check_positive(processes=[processes], timeout_s=[timeout_s])
    _check_share(max_errors=max_errors)
    requests_source, traffics, certificates = source(), traffic(), tls()
    with LookupClient(url, model, _INFO_TIMEOUT_S, tls=certificates) as client:
        info = client.info()
    outcomes: list[Report | Refusal] = []
    for samples, requests in requests_source.requests(model, info):
        for load in traffics:
            repeats = generate(url, requests, load, timeout_s, requests_source.bundle, processes, certificates)
            why = refusal(load, repeats)
            outcomes.append(
                summarize(load, samples, repeats) if why is None else Refusal(load.clients, load.rate, samples, why)
            )
            if as_json:
                print_json(msgspec.json.encode(outcomes[-1]))
    reports = [outcome for outcome in outcomes if isinstance(outcome, Report)]
    if not as_json and reports:
        out.print(table(reports))
        out.print(summary(reports))
        if price_per_hour is not None:
            out.print(costs(reports, price_per_hour))
    if requests_source.bundle is None:
        say("the answers were not checked: that needs --bundle")
    raise typer.Exit(_has_failed(outcomes, max_errors))


def _has_failed(outcomes: Sequence[Report | Refusal], max_errors: float) -> bool:
    """Print a line for each failure. Returns whether anything failed."""
    refused = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    for refused_load in refused:
        say(f"{named(refused_load)}: refused: {refused_load.refused}")
    failed = [
        outcome
        for outcome in outcomes
        if isinstance(outcome, Report) and (outcome.failed > max_errors or not outcome.answers)
    ]
    for report in failed:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.errors.items()) or "no answer"
        say(
            f"{named(report)}: {report.failed:.1%} of the requests failed, more than the {max_errors:.1%} of "
            f"--max-errors: {kinds}"
        )
    return bool(refused or failed)


def _check_positive(**numbers: Sequence[float]) -> None:
    """Refuse numbers that are not above 0 or exceed a million.

    Args:
        numbers: by option.

    Raises:
        ConfigurationError: a number is out of range. The message names its option.
    """
    for name, values in numbers.items():
        for number in values:
            if not 0 < number <= _MOST:
                raise ConfigurationError(f"{name}: expected > 0 and at most {_MOST}, got {number}")


def _check_share(**shares: float) -> None:
    """Refuse shares outside [0, 1].

    Args:
        shares: by option.

    Raises:
        ConfigurationError: a share is out of range. The message names its option.
    """
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ConfigurationError(f"{name}: expected a share in [0, 1], got {share}")


def _factor(name: str, text: str) -> float:
    try:
        factor = real("pooling_factor", text)
    except ConfigurationError:
        factor = -1.0
    if not 0 <= factor < 1e6:
        raise ConfigurationError(
            f"pooling_factor {as_given(name, text)!r}: expected [FEATURE=]X with X in [0, 1000000)"
        )
    return factor


def _captured(path: Path, info: ModelInfo) -> Sequence[Tensors]:
    skipped = SkippedLines()
    requests, left_out = captured_requests(path, info, skipped)
    for line in skipped.report(path):
        say(line)
    if left_out:
        say(f"{path}: {left_out} of {left_out + len(requests)} requests are malformed and are not sent")
    return requests
