"""The settings of a served model, in one table: what config.pbtxt says and `tbe-serve configure` changes.

An entry of `ServingSettings` is all that a setting needs beside its use: from it come the default, the check, the
parameter in config.pbtxt and the option of `tbe-serve configure`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, get_args, get_origin

import msgspec

from serving.addresses import is_address, is_host_name
from serving.arguments import check_arguments
from serving.errors import ConfigurationError
from serving.files.strict import UNREADABLE, is_utf8

# Most requests that Triton hands over together: `max_batch_size` in config.pbtxt.
LARGEST_HANDOVER = 256

# A parameter that `tbe-serve` adds to a model in a running server. config.pbtxt never has it. The model was loaded
# again because its process died. The value is when the server was started, in Unix time.
RECOVERED = "recovered"
# How `--version` asks for the newest version.
NEWEST = "newest"

# The largest numbers that the fields of Triton's config hold.
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a setting may have, as a test and in words: "expected `words`, got …"."""

    holds: Callable[[Any], bool]
    words: str


def _between(least: int, most: int) -> Allowed:
    return Allowed(lambda value: least <= value <= most, f"{least} to {most}")


_FINITE = Allowed(lambda value: 0 < value < math.inf, "a finite number > 0")
# Of a host: written in one way, so that no host is named twice.
_HOST_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_ABSOLUTE = Allowed(lambda value: value.startswith("/") and is_utf8(value), "an absolute path in UTF-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is known of a setting beside its name, its type and its default.

    Attributes:
        allowed: the values of its type that it may have. None: all.
        help: help text of its option.
        unset: help text of `--no-<name>`, which sets it to None; no such option where None.
        flag: its option, where that is not `--<name>`.
        metavar: what its option takes, where that is given by name: `[NAME=]X`. It may be given again.
        typed: type of its option, where that is not the setting's own.
        otherwise: what holds where the setting is None. None: nothing does.
        is_of_router: it means something for a router alone.
        is_of_scores: it means something for a model with scores alone.
        is_parameter: config.pbtxt holds it in `parameters`. Otherwise a field of Triton's own holds it, which
            `serving.model.config_file` reads and writes.
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


def _setting(default: Any, allowed: Allowed | None, help: str, **others: Any) -> Any:  # noqa: A002 - as typer calls it
    return field(default=default, metadata={"setting": Setting(allowed=allowed, help=help, **others)})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSettings:
    """How a model is served. What each setting means is its help text, in the table below.

    Raises:
        ConfigurationError: naming the setting, the values it may have and the one it got.
    """

    instances: int = _setting(
        1,
        _between(1, _INT32),
        "Processes that answer. Each uses a core for each of its threads; all share one copy of the weights.",
        is_parameter=False,
    )
    threads: int = _setting(
        1,
        _between(1, 1024),
        "Threads of each instance that look a large request up, each on a core of its own.",
    )
    merged_requests: int = _setting(64, _between(1, _INT32), "Most requests that one TBE call answers.")
    # With either of Triton's limits, Triton 2.51 stalls an idle model for up to 500 ms (docs/decisions/0009).
    queue_requests: int = _setting(
        0,
        _between(0, _INT32),
        "Most requests that wait in Triton's queue; more are refused as UNAVAILABLE. 0: no limit.",
        is_parameter=False,
    )
    queue_timeout_ms: int = _setting(
        0,
        _between(0, _INT32),
        "Longest time that a request waits in Triton's queue before it is refused as UNAVAILABLE. 0: no limit.",
        is_parameter=False,
    )
    max_request_ids: int = _setting(4 << 20, _between(1, _INT32), "Most ids in a request; larger ones are refused.")
    max_request_samples: int = _setting(
        64 << 10, _between(1, _INT32), "Most samples in a request; larger ones are refused."
    )
    max_call_ids: int = _setting(128 << 10, _between(1, _INT32), "Most ids in a TBE call; more take several calls.")
    max_call_samples: int = _setting(
        16 << 10, _between(1, _INT32), "Most samples in a TBE call; more take several calls."
    )
    max_sequence_bytes: int = _setting(
        256 << 20,
        _between(1, _INT64),
        "Most bytes of rows, n × dim as FP32, that a request is answered with, and those in one group; requests for "
        "more are refused.",
    )
    # Under overload an answer takes about twice this at most. Twice the default is within a client's default
    # deadline, 1 s.
    max_busy_ms: int = _setting(
        400,
        _between(1, _INT32),
        "Load shedding: requests that a backlog leaves unanswered for longer than this are refused as UNAVAILABLE.",
    )
    version: int | None = _setting(
        None,
        _between(1, _INT64),
        f"The version to serve, or '{NEWEST}' (default).",
        typed=str,
        is_parameter=False,
    )
    # Without it, a byte that changed after the export is served.
    verify_weights: bool = _setting(
        True, None, "Compare the weights with their digests before a version serves: about a second for each GB."
    )
    weights_memory: str = _setting(
        "mapped",
        Allowed(lambda value: value in ("mapped", "locked", "huge"), "mapped, locked or huge"),
        "Where the weights lie: 'mapped' (default) in the page cache, in huge pages where the kernel can; 'locked' "
        "the same, and never given back; 'huge' in one copy for all instances, on a hugetlbfs or a tmpfs with huge=.",
    )
    # The file is <capture>/<model>.jsonl. Neither weights nor answers are captured.
    capture: str | None = _setting(
        None,
        _ABSOLUTE,
        "Folder for the requests that are refused, kept for replay: ids and dense inputs. The server writes there.",
        unset="Capture nothing.",
    )
    capture_slow_ms: float | None = _setting(
        None,
        _FINITE,
        "Capture the requests of TBE calls that take longer than this, too.",
        unset="Capture no request for being slow.",
    )
    capture_max_bytes: int = _setting(64 << 20, _between(1, _INT64), "Largest size of the captured file.")
    score_threads: int | None = _setting(
        None,
        _between(1, 1024),
        "Of a model with scores: threads that each instance uses for what follows the embeddings; 1 by default.",
        unset="Take the default.",
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
        "Of a router: where a host of the plan is, HOST:PORT of one replica or several, joined by commas. A name may "
        "stand for many.",
        flag="--host",
        metavar="NUMBER=ADDRESSES",
        unset="Forget all addresses of hosts.",
        is_of_router=True,
    )
    shard_timeout_ms: int | None = _setting(
        None,
        _between(1, _INT32),
        "Of a router: how long a host may take, with all attempts; 300 by default. Requests that need a host that "
        "takes longer are refused as UNAVAILABLE.",
        unset="Take the default.",
        otherwise=300,
        is_of_router=True,
    )
    on_lost: Mapping[str, str] | None = _setting(
        None,
        Allowed(lambda value: {*value.values()} <= {"error", "zero"} and all(map(is_utf8, value)), "error or zero"),
        "Of a router: error (default) refuses requests that need rows of a lost host, zero puts zeros in their "
        "place. TABLE is a name or a glob; the last that matches counts.",
        metavar="[TABLE=]CHOICE",
        unset="Refuse all requests that need a lost host.",
        otherwise={"*": "error"},
        is_of_router=True,
    )
    hosts_root_certificates: str | None = _setting(
        None,
        _ABSOLUTE,
        "Of a router: TLS to hosts; a PEM file with who may have signed their certificates.",
        unset="No TLS to hosts.",
        is_of_router=True,
    )
    hosts_certificate_chain: str | None = _setting(
        None,
        _ABSOLUTE,
        "Of a router: PEM file with its own certificate, for mutual TLS.",
        unset="No mutual TLS.",
        is_of_router=True,
    )
    hosts_private_key: str | None = _setting(
        None,
        _ABSOLUTE,
        "Of a router: PEM file with its private key, for mutual TLS.",
        unset="No mutual TLS.",
        is_of_router=True,
    )
    hosts_server_name: str | None = _setting(
        None,
        Allowed(is_host_name, "the name of a host"),
        "Of a router: the name in hosts' certificates.",
        unset="The name is the address.",
        is_of_router=True,
    )
    # A file, since every client can read the config of a model.
    hosts_metadata: str | None = _setting(
        None,
        _ABSOLUTE,
        "Of a router: file with a JSON object of strings, such as a token, sent with each call to a host. It is read "
        "anew when it changes.",
        unset="Send no metadata.",
        is_of_router=True,
    )

    def __post_init__(self) -> None:
        check_arguments(self)
        for each, setting in table():
            value, allowed = getattr(self, each.name), setting.allowed
            if value is not None and allowed is not None and not allowed.holds(value):
                raise ConfigurationError(f"{each.name}: expected {allowed.words}, got {value!r}")

    def of_host(self) -> "ServingSettings":
        """These settings for a host of a router, which has no scores: what is not for it has its default."""
        defaults: dict[str, Any] = {
            each.name: each.default for each, setting in table() if setting.is_of_router or setting.is_of_scores
        }
        return replace(self, **defaults)

    @property
    def parameters(self) -> dict[str, str]:
        """The strings that config.pbtxt holds in `parameters`; no entry for None."""
        values = {each.name: getattr(self, each.name) for each, setting in table() if setting.is_parameter}
        return {name: _text(value) for name, value in values.items() if value is not None}


def table() -> list[tuple[Field[Any], Setting]]:
    """Every setting, in the order in which they are shown."""
    return [(each, each.metadata["setting"]) for each in fields(ServingSettings)]


def kind_of(each: Field[Any]) -> type:
    """The type of a setting's values; of `int | None`, int; of `Mapping[str, str] | None`, Mapping."""
    kind: Any = each.type
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    found: type = get_origin(kind) or kind
    return found


def parsed(parameters: Mapping[str, str]) -> dict[str, Any]:
    """The settings that config.pbtxt holds in `parameters`, as arguments of ServingSettings.

    Raises:
        ConfigurationError: a value is not a number, or not true or false, where one is expected.
    """
    return {
        each.name: _value(each.name, kind_of(each), parameters[each.name])
        for each, setting in table()
        if setting.is_parameter and each.name in parameters
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
