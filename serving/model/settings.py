"""The settings of a served model, in one table. config.pbtxt holds them, and `tbe-serve configure` changes them.

A setting is one entry of `ServingSettings`. Its default, its check, its parameter in config.pbtxt and its option of
`tbe-serve configure` come from that entry.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, get_args, get_origin

import msgspec

from serving.arguments import check_arguments, is_address, is_host_name
from serving.errors import ConfigurationError
from serving.files import UNREADABLE, is_utf8

# Maximum requests in one call of `execute`: `max_batch_size` in config.pbtxt.
LARGEST_HANDOVER = 256

# A parameter of a model that `tbe-serve run` loaded again because its process died, never in config.pbtxt. Its value
# is the start of the server, in Unix time.
RECOVERED = "recovered"
# The value of `--version` for the newest version.
NEWEST = "newest"

# The largest numbers that the fields of Triton's config hold.
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_FLAGS = {"true": True, "false": False}


class WeightsMemory(StrEnum):
    """Where the weights files of a served bundle are held in memory.

    mapped: in the page cache, which all processes of the machine share; in huge pages if the kernel supports them.
    locked: as mapped, and locked in memory (mlock(2)).
    huge: in one copy for all processes, on a file system of huge pages: hugetlbfs, or a tmpfs with `huge=`.
    live: in one copy for all processes, which deltas change; in huge pages if such a file system is mounted.
    """

    MAPPED = "mapped"
    LOCKED = "locked"
    HUGE = "huge"
    LIVE = "live"


@dataclass(frozen=True, slots=True)
class Allowed:
    """The allowed values of a setting: a test, and the `words` of the message "expected `words`, got …"."""

    holds: Callable[[Any], bool]
    words: str


def _between(least: int, most: int) -> Allowed:
    return Allowed(lambda value: least <= value <= most, f"{least} to {most}")


def _one_of(values: type[StrEnum]) -> Allowed:
    *names, last = values
    return Allowed(lambda value: value in [*values], f"{', '.join(names)} or {last}")


_FINITE = Allowed(lambda value: 0 < value < math.inf, "a finite number > 0")
# The number of a host, in a form with only one spelling, so that no host is named twice.
_HOST_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_ABSOLUTE = Allowed(lambda value: value.startswith("/") and is_utf8(value), "an absolute path in UTF-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The properties of a setting beside its name, its type and its default.

    Attributes:
        allowed: the allowed values of its type. None: all values.
        help: the help text of its option.
        unset: the help text of the option `--no-<name>`, which sets it to None. None: it has no such option.
        flag: the name of its option. None: `--<name>`.
        metavar: the form of its option's values if they are set by name: `[NAME=]X`. The option may be repeated.
        typed: the type of its option. None: the type of the setting.
        otherwise: the value that applies if the setting is None, or None.
        is_of_router: whether only routers use it.
        is_of_scores: whether only models with scores use it.
        is_parameter: whether it is in `parameters` of config.pbtxt. If not, it is a field of Triton's ModelConfig,
            which `serving.model.config_file` reads and writes.
    """

    allowed: Allowed | None
    help: str
    unset: str | None = None
    flag: str | None = None
    metavar: str | None = None
    otherwise: Any = None
    is_of_router: bool = False
    is_of_scores: bool = False
    typed: type | None = None
    is_parameter: bool = True


def _setting(default: Any, allowed: Allowed | None, help: str, **metadata_fields: Any) -> Any:  # noqa: A002 - as typer calls it
    return field(default=default, metadata={"setting": Setting(allowed=allowed, help=help, **metadata_fields)})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSettings:
    """The settings of a served model. The help text of each setting explains it.

    Raises:
        ConfigurationError: a setting has a value that is not allowed. The message lists the allowed values.
    """

    instances: int = _setting(
        1,
        _between(1, _INT32),
        "Processes that answer requests. Each uses one core per thread. All share one copy of the weights files.",
        is_parameter=False,
    )
    threads: int = _setting(
        1,
        _between(1, 1024),
        "Threads of each instance that share the lookup of a large request. Each uses one core.",
    )
    merged_requests: int = _setting(64, _between(1, _INT32), "Maximum requests per TBE call.")
    # If one of the next two is set, Triton 2.51 stalls an idle model for up to 500 ms (docs/decisions/0009).
    queue_requests: int = _setting(
        0,
        _between(0, _INT32),
        "Maximum requests in Triton's queue. More are refused as UNAVAILABLE. 0: no limit.",
        is_parameter=False,
    )
    queue_timeout_ms: int = _setting(
        0,
        _between(0, _INT32),
        "Maximum time in Triton's queue. A request that waits longer is refused as UNAVAILABLE. 0: no limit.",
        is_parameter=False,
    )
    max_request_ids: int = _setting(
        4 << 20, _between(1, _INT32), "Maximum ids in a request. Larger ones are refused."
    )
    max_request_samples: int = _setting(
        64 << 10, _between(1, _INT32), "Maximum samples in a request. Larger ones are refused."
    )
    max_call_ids: int = _setting(
        128 << 10, _between(1, _INT32), "Maximum ids per TBE call. Larger batches are split."
    )
    max_call_samples: int = _setting(
        16 << 10, _between(1, _INT32), "Maximum samples per TBE call. Larger batches are split."
    )
    max_sequence_bytes: int = _setting(
        256 << 20,
        _between(1, _INT64),
        "Maximum bytes of the unpooled rows that a request asks for (n × dim, as FP32), and of the sequences that "
        "its scores are made of. A request for more is refused. Requests that exceed it only together are answered "
        "apart.",
    )
    # Under overload, an answer takes at most about twice this time. Twice the default is less than a client's default
    # deadline, 1 s.
    max_busy_ms: int = _setting(
        400,
        _between(1, _INT32),
        "Load shedding: a request that has waited longer than this is refused as UNAVAILABLE.",
    )
    version: int | None = _setting(
        None,
        _between(1, _INT64),
        f"The version to serve, or '{NEWEST}' (default).",
        typed=str,
        is_parameter=False,
    )
    # Otherwise, bytes that were changed after the export would be served.
    verify_weights: bool = _setting(
        True, None, "Compare the weights files with their digests before a version serves: about one second per GB."
    )
    weights_memory: str = _setting(
        WeightsMemory.MAPPED.value,
        _one_of(WeightsMemory),
        "Where the weights are in memory. 'mapped' (default): in the page cache, in huge pages where the kernel can. "
        "'locked': the same, and never evicted. 'huge': one copy for all instances, on a hugetlbfs or a tmpfs with "
        "huge=. 'live': one such copy, or one in /dev/shm, whose rows deltas change.",
    )
    # The file is <capture>/<model>.jsonl. Neither per-id weights nor answers are captured.
    capture: str | None = _setting(
        None,
        _ABSOLUTE,
        "Folder where the server captures refused requests for replay: their ids and dense inputs.",
        unset="Capture nothing.",
    )
    capture_slow_ms: float | None = _setting(
        None,
        _FINITE,
        "Also capture the requests of a TBE call that takes longer than this.",
        unset="Do not capture slow requests.",
    )
    capture_max_bytes: int = _setting(64 << 20, _between(1, _INT64), "Maximum size of the captured file.")
    score_threads: int | None = _setting(
        None,
        _between(1, 1024),
        "For a model with scores: threads of each instance for the dense part. Default: 1.",
        unset="Use the default.",
        otherwise=1,
        is_of_scores=True,
    )
    hosts: Mapping[str, str] | None = _setting(
        None,
        Allowed(
            lambda value: all(
                _HOST_NUMBER.fullmatch(number) and all(map(is_address, addresses.split(",")))
                for number, addresses in value.items()
            ),
            "NUMBER=HOST:PORT[,HOST:PORT]",
        ),
        "For a router: the addresses of a host of the plan, HOST:PORT of each replica, joined by commas. A name may "
        "resolve to several replicas.",
        flag="--host",
        metavar="NUMBER=ADDRESSES",
        unset="Remove the addresses of all hosts.",
        is_of_router=True,
    )
    shard_timeout_ms: int | None = _setting(
        None,
        _between(1, _INT32),
        "For a router: maximum time of a call to a host, with all attempts. Default: 300. Requests that need a "
        "slower host are refused as UNAVAILABLE.",
        unset="Use the default.",
        otherwise=300,
        is_of_router=True,
    )
    on_shard_failure: Mapping[str, str] | None = _setting(
        None,
        Allowed(lambda value: {*value.values()} <= {"error", "zero"} and all(map(is_utf8, value)), "error or zero"),
        "For a router: what happens to requests that need rows of a lost host. error (default): they are refused. "
        "zero: they get zeros for these rows. TABLE is a name or a glob; the last match applies.",
        metavar="[TABLE=]CHOICE",
        unset="Refuse all requests that need a lost host.",
        otherwise={"*": "error"},
        is_of_router=True,
    )
    hosts_root_certificates: str | None = _setting(
        None,
        _ABSOLUTE,
        "For a router: PEM file with root certificates for its hosts' certificates. Without it, no TLS to hosts.",
        unset="No TLS to hosts.",
        is_of_router=True,
    )
    hosts_certificate_chain: str | None = _setting(
        None,
        _ABSOLUTE,
        "For a router: PEM file with its own certificate, for mutual TLS.",
        unset="No mutual TLS.",
        is_of_router=True,
    )
    hosts_private_key: str | None = _setting(
        None,
        _ABSOLUTE,
        "For a router: PEM file with its private key, for mutual TLS.",
        unset="No mutual TLS.",
        is_of_router=True,
    )
    hosts_server_name: str | None = _setting(
        None,
        Allowed(is_host_name, "the name of a host"),
        "For a router: the name that hosts' certificates must have. Default: the address.",
        unset="Use the default.",
        is_of_router=True,
    )
    # A file, because every client can read a model's config.
    hosts_metadata: str | None = _setting(
        None,
        _ABSOLUTE,
        "For a router: file with metadata for each call to a host, such as a token: a JSON object of strings. It is "
        "read again when it changes.",
        unset="Send no metadata.",
        is_of_router=True,
    )

    def __post_init__(self) -> None:
        check_arguments(self)
        for entry, setting in table():
            value, allowed = getattr(self, entry.name), setting.allowed
            if value is not None and allowed is not None and not allowed.holds(value):
                raise ConfigurationError(f"{entry.name}: expected {allowed.words}, got {value!r}")

    def of_host(self) -> "ServingSettings":
        """These settings for a host of a router. Settings for routers and for scores have their defaults."""
        defaults: dict[str, Any] = {
            entry.name: entry.default for entry, setting in table() if setting.is_of_router or setting.is_of_scores
        }
        return replace(self, **defaults)

    @property
    def parameters(self) -> dict[str, str]:
        """The strings for `parameters` of config.pbtxt. Settings that are None have no entry."""
        values = {entry.name: getattr(self, entry.name) for entry, setting in table() if setting.is_parameter}
        return {name: _text(value) for name, value in values.items() if value is not None}


def table() -> list[tuple[Field[Any], Setting]]:
    """Every setting, in the order in which they are shown."""
    return [(setting, setting.metadata["setting"]) for setting in fields(ServingSettings)]


def kind_of(entry: Field[Any]) -> type:
    """The type of a setting's values: int for `int | None`, Mapping for `Mapping[str, str] | None`."""
    kind: Any = entry.type
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    origin: type = get_origin(kind) or kind
    return origin


def parsed(parameters: Mapping[str, str]) -> dict[str, Any]:
    """The settings in `parameters` of config.pbtxt, as arguments of ServingSettings.

    Raises:
        ConfigurationError: a value does not have the setting's type.
    """
    return {
        entry.name: _value(entry.name, kind_of(entry), parameters[entry.name])
        for entry, setting in table()
        if setting.is_parameter and entry.name in parameters
    }


def _value(name: str, kind: type, text: str) -> Any:
    if kind is Mapping:
        try:
            return msgspec.json.decode(text, type=dict[str, str])
        except UNREADABLE as error:
            raise ConfigurationError(f"{name}: expected a JSON object of strings, got {text!r}: {error}") from error
    try:
        return _FLAGS[text] if kind is bool else kind(text)
    except (ValueError, KeyError) as error:
        expected = "true or false" if kind is bool else "a number"
        raise ConfigurationError(f"{name}: expected {expected}, got {text!r}") from error


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return msgspec.json.encode(value, order="sorted").decode()
    return str(value).lower() if isinstance(value, bool) else str(value)
