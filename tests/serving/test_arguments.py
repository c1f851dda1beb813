"""Every config refuses values of another type where it is made, and names the argument."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import DefaultRow, ExportConfig, IdPolicy, Sharding, WeightDtype
from export.compare.study import StudyOptions
from serving.arguments import check_argument
from serving.client import AsyncLookupClient, LookupClient, Retries, Tls
from serving.client.connection import Connection
from serving.errors import ConfigurationError
from serving.model.settings import ServingSettings
from serving.server import Access, Control, Ports, ServerTls
from serving.server.private_folder import Trust
from tests.support.deadlines import PATIENT_S

# numpy 2 shows the type of its 2, numpy 1 does not.
NUMPY_2 = repr(np.int64(2)) if "int64" in repr(np.int64(2)) else "int64 2"


def client(**arguments: Any) -> LookupClient:
    return LookupClient(**({"addresses": "127.0.0.1:1", "model": "m"} | arguments))


def connection(**arguments: Any) -> Connection:
    return Connection(**({"addresses": ["127.0.0.1:1"]} | arguments))


def study(**arguments: Any) -> StudyOptions:
    good: dict[str, Any] = {
        "strategies": ["row_wise"],
        "ranks": [2],
        "ranks_per_host": None,
        "memory_bytes": None,
        "dtypes": [],
    }
    return StudyOptions(**(good | {"batch_size": 1, "seconds": 1.0} | arguments))


def control(**arguments: Any) -> Control:
    return Control(**({"address": "127.0.0.1:1", "key": None, "timeout_s": 1.0} | arguments))


def trust(**arguments: Any) -> Trust:
    return Trust(**({"keys": Path("keys.pem")} | arguments))


def server_tls(**arguments: Any) -> ServerTls:
    return ServerTls(**({"certificate": Path("c"), "private_key": Path("k")} | arguments))


NO_INTS: list[Any] = ["3", True, 3.0, [3], {}]
NO_FLOATS: list[Any] = ["3", True, [3.0]]
NO_FLAGS: list[Any] = ["yes", 1, None]
NO_TEXTS: list[Any] = [5, b"x", ["x"], True]
NO_PATHS: list[Any] = ["x", b"x", 5]
NO_MAPPINGS: list[Any] = ["int4", 5, None, [("*", 1)]]

WRONG: list[tuple[Callable[..., Any], str, list[Any]]] = [
    (ExportConfig, "dtype", [*NO_MAPPINGS, {"*": "int4"}, {"*": None}, {5: WeightDtype.INT4}]),
    (ExportConfig, "id_policy", [*NO_MAPPINGS, "zero", IdPolicy.ZERO, {"*": "zero"}, {"*": 5}]),
    (ExportConfig, "max_error", [*NO_MAPPINGS, {"*": "0.1"}, {"*": True}, {"*": None}]),
    (ExportConfig, "output_dtype", ["fp16", None, 16]),
    (ExportConfig, "sharding", ["auto", None, {}, 4]),
    (ExportConfig, "serving", [{}, "x", 5]),
    (ExportConfig, "example", ["x", 5, [1]]),
    *((Sharding, name, [*NO_INTS, None]) for name in ("ranks", "machine_bytes", "batch_size", "row_wise_over")),
    (Sharding, "column_wise_over", [*NO_INTS, None]),
    *((Sharding, name, NO_INTS) for name in ("ranks_per_host", "memory_bytes")),
    (Sharding, "types", [*NO_MAPPINGS, {"*": 5}, {"*": [5]}]),
    (Sharding, "pooling_factors", [*NO_MAPPINGS, {"*": "3"}, {"*": None}]),
    (Sharding, "min_partition", [*NO_MAPPINGS, {"*": 8.0}, {"*": "8"}]),
    (Sharding, "plan", [5, b"x"]),
    *((ServingSettings, name, [*NO_INTS, None]) for name in ("instances", "max_busy_ms", "capture_max_bytes")),
    (ServingSettings, "version", NO_INTS),
    (ServingSettings, "verify_weights", NO_FLAGS),
    (ServingSettings, "capture", [5, b"/x", Path("/x"), True]),
    (ServingSettings, "capture_slow_ms", NO_FLOATS),
    (Retries, "attempts", [*NO_INTS, None]),
    *((Retries, name, [*NO_FLOATS, None]) for name in ("backoff_s", "max_backoff_s")),
    *((Tls, name, NO_PATHS) for name in ("root_certificates", "certificate_chain", "private_key")),
    (Tls, "server_name", NO_TEXTS),
    (connection, "addresses", ["127.0.0.1:1", 5, None, [5], {"127.0.0.1:1"}]),
    (connection, "timeout_s", [*NO_FLOATS, None]),
    (connection, "retries", [3, None, {}]),
    (connection, "tls", ["x", True, {}]),
    (client, "addresses", [5, None, [5], b"127.0.0.1:1", {"127.0.0.1:1"}]),
    (client, "model", [5, None, b"m", ["m"]]),
    (client, "timeout_s", [*NO_FLOATS, None]),
    (client, "retries", [3, 0, {}, False]),
    (client, "tls", ["x", True, {}, ""]),
    (study, "strategies", ["row_wise", 5, [5]]),
    (study, "ranks", [2, ["2"], [2.0], None]),
    (study, "dtypes", ["int8", ["int8"], None]),
    (study, "seconds", [*NO_FLOATS, None]),
    (control, "address", [5, None]),
    (control, "timeout_s", [*NO_FLOATS, None]),
    (trust, "keys", [*NO_PATHS, None]),
    (trust, "weights_in_place", NO_FLAGS),
    (trust, "min_versions", [*NO_MAPPINGS, {"m": "3"}, {"m": 1.0}]),
    (Access, "host", NO_TEXTS),
    (Access, "allow", ["shared-memory", [], (5,), None]),
    (Access, "tls", ["x", True]),
    (server_tls, "certificate", [*NO_PATHS, None]),
    *((Ports, name, [*NO_INTS, None]) for name in ("grpc", "http", "operations")),
]


@pytest.mark.parametrize(
    ("make", "name", "values"), [pytest.param(*case, id=f"{case[0].__name__} {case[1]}") for case in WRONG]
)
def test_an_argument_of_another_type_is_refused_by_name(
    make: Callable[..., Any], name: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(ConfigurationError, match=rf"^{name}( '\*'| '\w+'| 5)?: expected .*, got ") as refused:
            make(**{name: value})
        assert "ForwardRef" not in str(refused.value)


@pytest.mark.parametrize("example", [(), (1, "x", None), {"ids": 5}, {}])
def test_an_example_has_arguments_of_any_type(example: Any) -> None:
    assert ExportConfig(example=example).example == example


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ExportConfig(id_policy={"a": "zero"}), "id_policy 'a': expected IdPolicy.ZERO, got 'zero'"),  # type: ignore[dict-item]
        (
            lambda: ExportConfig(id_policy={"a": DefaultRow(default_row="3")}),  # type: ignore[arg-type]
            "id_policy 'a': default_row: expected int, got '3'",
        ),
        (lambda: control(key=b"secret"), "key: expected str | None, got bytes"),
        (lambda: check_argument("a", {"b": 5}, dict[str, str]), "a 'b': expected str, got 5"),
        (lambda: check_argument("a", "x" * 1000, int), "a: expected int, got 'xxxxxxxxxxxx...xxxxxxxxxxxxx'"),
    ],
)
def test_messages_name_the_argument(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(said)}$"):
        make()


@pytest.mark.parametrize("kind", [LookupClient, AsyncLookupClient])
@pytest.mark.parametrize(
    ("arguments", "name"), [({"timeout_s": "1"}, "timeout_s"), ({"trace": 5}, "trace"), ({"trace": "a\nb"}, "trace")]
)
def test_a_lookup_refuses_its_own_arguments(kind: Any, arguments: Any, name: str) -> None:
    import asyncio

    async def run() -> None:
        opened = kind("127.0.0.1:1", "m")
        answer = opened.lookup({"x": [[1]]}, **{"timeout_s": PATIENT_S, **arguments})
        if kind is AsyncLookupClient:
            await answer

    with pytest.raises(ConfigurationError, match=f"^{name}: expected "):
        asyncio.run(run())
