"""What to export, as people write it: options of the commands, and a TOML file with the same names::

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

The command line comes after the file. Where both set the same key of the same table, the command line counts.
`export.commands.options` lists all keys.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from export.commands.options import OPTIONS, ByTable
from export.commands.toml_file import read_toml
from export.config import ExportConfig
from export.plan.sharding import Sharding, check_beside_plan
from serving.errors import ConfigurationError
from serving.model.settings import ServingSettings
from serving.terminal.options import by_name, shared_options, with_options

# Values as typed or written, by an option's name; None where not set. The key "serving" has that table of the file.
Settings = Mapping[str, Any]


def _strict_struct(section: str, **more: Any) -> type[msgspec.Struct]:
    """The type of a TOML table: the keys of `section`, and `more` keys with their types. Keys not there are None."""
    types = {option.name: option.file_type for option in OPTIONS if option.section == section} | more
    keys: list[tuple[str, Any, Any]] = [(name, kind | None, None) for name, kind in types.items()]
    return msgspec.defstruct("File", keys, frozen=True, kw_only=True, forbid_unknown_fields=True)


_File = _strict_struct("", sharding=_strict_struct("sharding"), serving=dict[str, Any])


def read_settings(path: Path) -> Settings:
    """Read a TOML file.

    Raises:
        ConfigurationError: the file cannot be read, or a line or key of it is wrong.
    """
    settings = msgspec.structs.asdict(read_toml(path, _File))
    sharding = settings.pop("sharding")
    return settings | ({} if sharding is None else msgspec.structs.asdict(sharding))


def by_table(given: Sequence[str] | None) -> ByTable | None:
    """Options of the form [TABLE=]X: ["int8", "item*=fp16"] to {"*": "int8", "item*": "fp16"}."""
    return {**by_name(given)} if given else None


def merge_settings(first: Settings, then: Settings) -> Settings:
    """`first`, overridden by what `then` sets. Values by table are overridden pattern by pattern."""
    merged = dict(first)
    for name, value in then.items():
        before = first.get(name)
        if isinstance(value, dict) and before is not None:
            before = before if isinstance(before, dict) else {"*": before}
            value = {pattern: each for pattern, each in before.items() if pattern not in value} | value
        if value is not None:
            merged[name] = value
    return merged


def export_config(settings: Settings) -> ExportConfig:
    """Check settings, and make a config of them.

    Raises:
        ConfigurationError: naming the setting, what was expected and what came.
    """
    fields: dict[str, dict[str, Any]] = {"": {}, "sharding": {}}
    for option in OPTIONS:
        if (value := settings.get(option.name)) is not None:
            fields[option.section][option.field or option.name] = option.value_of(value)
    if "plan" in fields["sharding"]:
        check_beside_plan(fields["sharding"])
    serving = settings.get("serving")
    return ExportConfig(
        **fields[""],
        sharding=Sharding(**fields["sharding"]),
        serving=None if serving is None else _serving(serving),
    )


def _serving(table: Mapping[str, Any]) -> ServingSettings:
    if unknown := table.keys() - {each.name for each in dataclasses.fields(ServingSettings)}:
        raise ConfigurationError(f"serving: unknown setting {min(unknown)!r}")
    try:
        return msgspec.convert(table, ServingSettings)
    except (ConfigurationError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"serving: {error}") from error  # adds the name of the TOML table


def _read_options(*, config: Path | None, **typed: Any) -> ExportConfig:
    for option in OPTIONS:
        if option.each:
            typed[option.name] = by_table(typed[option.name])
    if config is None:
        return export_config(typed)
    written = read_settings(config)
    try:
        return export_config(merge_settings(written, typed))
    except ConfigurationError as error:
        # If the file alone, or one key of it, is refused with the same words, then it is the file that is wrong.
        if str(error) in map(_refusal, [written, *({name: value} for name, value in written.items())]):
            raise ConfigurationError(f"{config}: {error}") from error
        raise


def _refusal(settings: Settings) -> str | None:
    """Why settings are refused; None: they are not."""
    try:
        export_config(settings)
    except ConfigurationError as error:
        return str(error)
    return None


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "config": (
        Annotated[
            Path | None, typer.Option(help="A TOML file with these settings. Options given beside it override it.")
        ],
        None,
    ),
    **{option.name: (option.terminal_type, None) for option in OPTIONS},
}
# Gives a command these options. In their place it gets `config()`, which makes an ExportConfig of them, or raises
# ConfigurationError.
takes_settings = shared_options("config", with_options(_read_options, _OPTIONS))
Config = Callable[[], ExportConfig]
