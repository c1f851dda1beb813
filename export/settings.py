"""What to export, as people write it: options of the command, and a TOML file with the same names::

    output_dtype = "fp16"
    dtype = { "*" = "int4", user = "fp16" }     # or for all tables: dtype = "int4"
    id_policy = { "*" = "zero", user = "default_row:0" }
    max_error = { "item*" = 0.01 }

    [sharding]
    ranks = 8
    ranks_per_host = 4
    memory_per_rank = "16 GB"
    types = { "*" = "auto", user = "row_wise" }
    pooling_factors = { words = 20 }

    [serving]                                   # as `tbe-serve configure`
    instances = 2
    queue_timeout_ms = 50

What the command line says comes after the file, and counts where both speak of a table.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from export.config import ExportConfig
from export.errors import ConfigError
from export.sharding import MOST_BYTES, Sharding
from serving.bundle import DefaultRow, IdPolicy, OutputDtype, WeightDtype
from serving.errors import ConfigurationError
from serving.settings import ServingSettings

T = TypeVar("T")
E = TypeVar("E", bound=Enum)
# One setting for all tables, or settings by table; numbers may be written as text.
ByTable = str | int | float | dict[str, str | int | float]

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


class ShardingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [sharding] of the file; what is None was not said."""

    ranks: int | None = None
    ranks_per_host: int | None = None
    memory_per_rank: str | int | None = None
    types: ByTable | None = None
    pooling_factors: ByTable | None = None
    min_partition: ByTable | None = None
    batch_size: int | None = None
    row_wise_over: int | None = None
    column_wise_over: int | None = None
    plan: str | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file; what is None was not said."""

    dtype: ByTable | None = None
    id_policy: ByTable | None = None
    max_error: ByTable | None = None
    output_dtype: str | None = None
    sharding: ShardingSettings = ShardingSettings()
    serving: dict[str, Any] | None = None


def by_table(given: Sequence[str] | None) -> ByTable | None:
    """Options of the form [TABLE=]X: ["int8", "item*=fp16"] to {"*": "int8", "item*": "fp16"}."""
    if not given:
        return None
    settings: dict[str, str | int | float] = {}
    for each in given:
        pattern, _, text = each.rpartition("=")
        settings.pop(pattern or "*", None)  # a pattern given again counts where it is given last
        settings[pattern or "*"] = text
    return settings


def merge_settings(first: Settings, then: Settings) -> Settings:
    """`first`, and what `then` says on top."""
    merged: Settings = _merge(first, then)
    return msgspec.structs.replace(merged, sharding=_merge(first.sharding, then.sharding))


def export_config(settings: Settings) -> ExportConfig:
    """Check all values.

    Raises:
        ConfigError: naming the setting, what was expected and what came.
    """
    sharding = settings.sharding
    said: dict[str, Any] = {
        "ranks": sharding.ranks,
        "ranks_per_host": sharding.ranks_per_host,
        "memory_bytes": None if sharding.memory_per_rank is None else size_bytes(sharding.memory_per_rank),
        "batch_size": sharding.batch_size,
        "row_wise_over": sharding.row_wise_over,
        "column_wise_over": sharding.column_wise_over,
        "plan": None if sharding.plan is None else Path(sharding.plan),
    }
    return ExportConfig(
        dtype=_parsed(settings.dtype, dtype_named),
        id_policy=_parsed(settings.id_policy, _id_policy),
        max_error=_parsed(settings.max_error, lambda text: _number("max_error", float, text)),
        output_dtype=_member("output_dtype", OutputDtype, (settings.output_dtype or "fp32").upper()),
        sharding=Sharding(
            types=_parsed(sharding.types, lambda text: text.lower()),
            pooling_factors=factors_by_table(sharding.pooling_factors),
            min_partition=_parsed(sharding.min_partition, lambda text: _number("min_partition", int, text)),
            **{name: value for name, value in said.items() if value is not None},
        ),
        serving=None if settings.serving is None else _serving(settings.serving),
    )


def factors_by_table(given: ByTable | None) -> Mapping[str, float]:
    """Pooling factors; Sharding says which can be.

    Raises:
        ConfigError: one is no number.
    """
    return _parsed(given, lambda text: _number("pooling_factors", float, text))


def dtype_named(text: str) -> WeightDtype:
    """The dtype that people call int8.

    Raises:
        ConfigError: there is none of that name.
    """
    return _member("dtype", WeightDtype, text.upper())


def size_bytes(text: str | int) -> int:
    """Bytes of "16 GB" (10⁹), "16GiB" (2³⁰), or a plain number.

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", str(text).strip())
    size = float(match[1]) * _UNITS.get(match[2].lower(), math.nan) if match else math.nan
    if not 1 <= size <= MOST_BYTES:
        raise ConfigError(f"memory_per_rank: expected a size such as 16GB or 16GiB, got {str(text)!r}")
    return int(size)


def _merge(first: Any, then: Any) -> Any:
    merged = {}
    for name in first.__struct_fields__:
        before, after = getattr(first, name), getattr(then, name)
        merged[name] = before if after is None else after
        if isinstance(after, dict) and before is not None:
            before = before if isinstance(before, dict) else {"*": before}
            merged[name] = {pattern: value for pattern, value in before.items() if pattern not in after} | after
    return type(first)(**merged)


def _parsed(given: ByTable | None, parse: Callable[[str], T]) -> Mapping[str, T]:
    if given is None:
        return {}
    settings = given if isinstance(given, dict) else {"*": given}
    return {pattern: parse(str(value)) for pattern, value in settings.items()}


def _id_policy(text: str) -> IdPolicy | DefaultRow:
    name, _, row = text.lower().partition(":")
    if name == "default_row":
        return DefaultRow(default_row=_number("id_policy", int, row))
    try:
        return IdPolicy(text.lower())
    except ValueError as error:
        raise ConfigError(f"id_policy: expected error, zero or default_row:ROW, got {text!r}") from error


def _serving(said: Mapping[str, Any]) -> ServingSettings:
    if unknown := said.keys() - {each.name for each in dataclasses.fields(ServingSettings)}:
        raise ConfigError(f"serving: unknown setting {min(unknown)!r}")
    try:
        return msgspec.convert(said, ServingSettings)
    except (ConfigurationError, msgspec.ValidationError) as error:
        raise ConfigError(f"serving: {error}") from error


def _member(option: str, kind: type[E], text: str) -> E:
    try:
        return kind(text)
    except ValueError as error:
        names = ", ".join(str(member.value).lower() for member in kind)
        raise ConfigError(f"{option}: expected one of {names}, got {text.lower()!r}") from error


def _number(option: str, kind: Callable[[str], T], text: str) -> T:
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{option}: expected a number, got {text!r}") from error
