"""The settings of an export: from options of a command, and from a TOML file with the same names.

A settings file::

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

If the file and the command line set the same key of the same table, the command line wins.
`export.commands.options` lists all keys.

A tables file describes tables, for a study without a model::

    [tables.item]
    rows = 1_000_000
    dim = 64
    pooling_factor = 20             # mean number of ids in a bag. Default: 1
    pooling = "mean"                # Default: "sum"
    features = ["item", "recent"]   # Default: one feature with the table's name
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import typer

from export.commands.options import OPTIONS, ByTable
from export.config import ExportConfig
from export.plan.sharding import Sharding, check_beside_plan
from export.values import MOST_BYTES
from serving.bundle.tables import Pooling
from serving.errors import ConfigurationError
from serving.files import UNREADABLE, read_file
from serving.model.settings import ServingSettings
from serving.terminal.options import by_name, shared_options, with_options

if TYPE_CHECKING:
    from export.trained.tables import TrainedTable

T = TypeVar("T")


def read_toml(path: Path, kind: type[T]) -> T:
    """Read the file at `path` as a `kind`.

    Raises:
        ConfigurationError: the file cannot be read, or a line or key is wrong. The message names it.
    """
    try:
        content = tomllib.loads(read_file(path, follow=True).decode())
        _expect_known(str(path), content, kind)
        return msgspec.convert(content, kind)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, *UNREADABLE) as error:  # TOMLDecodeError; and int() refuses 5,000 digits
        raise ConfigurationError(f"{path}: {error}") from error


def _expect_known(where: str, table: Mapping[str, Any], kind: type) -> None:
    """Refuse a key that a struct or dataclass does not have, in a TOML table or in one of its tables."""
    types = get_type_hints(kind)
    for key, value in table.items():
        if key not in types:
            raise ConfigurationError(f"{where}: unknown key {key!r}: expected one of {', '.join(types)}")
        structs = [argument for argument in get_args(types[key]) if hasattr(argument, "__struct_fields__")]
        if not structs or not isinstance(value, dict):
            continue
        is_by_name = get_origin(types[key]) is dict
        tables = {f"{key}.{name}": part for name, part in value.items()} if is_by_name else {key: value}
        for name, part in tables.items():
            if isinstance(part, dict):
                _expect_known(f"{where}: [{name}]", part, structs[0])


# Values as typed or written, by an option's name. None: not set. "serving" is the TOML table [serving].
Settings = Mapping[str, Any]


def _strict_struct(section: str, **more: Any) -> type[msgspec.Struct]:
    """The type of a TOML table: the keys of `section`, and `more` keys with their types. Missing keys are None."""
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


def written_settings(settings: Settings) -> str:
    """Settings as the text of a TOML file, which `read_settings` reads.

    Args:
        settings: as `read_settings` returns them.
    """
    sections: dict[str, dict[str, Any]] = {"": {}, "sharding": {}, "serving": settings.get("serving") or {}}
    for option in OPTIONS:
        if (value := settings.get(option.name)) is not None:
            sections[option.section][option.name] = value
    lines = []
    for section, keys in sections.items():
        lines += ["", f"[{section}]"] if section and keys else []
        lines += [f"{key} = {_toml_value(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    """Text, numbers, booleans, and lists and tables of them. JSON's text is TOML's, but for DEL."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_value(key)} = {_toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def by_table(texts: Sequence[str] | None) -> ByTable | None:
    """Parse options of the form [TABLE=]X: ["int8", "item*=fp16"] to {"*": "int8", "item*": "fp16"}."""
    return {**by_name(texts)} if texts else None


def merge_settings(first: Settings, then: Settings) -> Settings:
    """Return `first`, overridden by the settings of `then`. Values by table are overridden pattern by pattern."""
    merged = dict(first)
    for name, value in then.items():
        before = first.get(name)
        if isinstance(value, dict) and before is not None:
            before = before if isinstance(before, dict) else {"*": before}
            # A pattern of `then` comes last, so that it wins.
            value = {pattern: old for pattern, old in before.items() if pattern not in value} | value
        if value is not None:
            merged[name] = value
    return merged


def export_config(settings: Settings) -> ExportConfig:
    """Make an ExportConfig of settings.

    Raises:
        ConfigurationError: naming the setting, the values that it may have, and the one that it got.
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
    _expect_known("serving", table, ServingSettings)
    try:
        return msgspec.convert(table, ServingSettings)
    except (ConfigurationError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"serving: {error}") from error  # adds the name of the TOML table


def _read_options(*, config: Path | None, **typed: Any) -> ExportConfig:
    for option in OPTIONS:
        if option.metavar:
            typed[option.name] = by_table(typed[option.name])
    if config is None:
        return export_config(typed)
    written = read_settings(config)
    try:
        return export_config(merge_settings(written, typed))
    except ConfigurationError as error:
        # If the file alone, or one of its keys, is refused with the same message, the file is wrong: name it.
        if str(error) in map(_refusal, [written, *({name: value} for name, value in written.items())]):
            raise ConfigurationError(f"{config}: {error}") from error
        raise


def _refusal(settings: Settings) -> str | None:
    """Why settings are refused, or None if they are accepted."""
    try:
        export_config(settings)
    except ConfigurationError as error:
        return str(error)
    return None


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "config": (
        Annotated[
            Path | None,
            typer.Option(help="A TOML file with these settings. Options on the command line override it."),
        ],
        None,
    ),
    **{option.name: (option.terminal_type, None) for option in OPTIONS},
}
# A command calls `config()` for the ExportConfig of these options. It raises ConfigurationError.
takes_settings = shared_options("config", with_options(_read_options, _OPTIONS))
Config = partial[ExportConfig]


def as_written(config: Config, name: str) -> str | None:
    """The value of a setting in a command's options or in their settings file, as text, or None."""
    file = config.keywords["config"]
    value = config.keywords[name] if file is None else merge_settings(read_settings(file), config.keywords).get(name)
    return None if value is None else str(value)


class _TableKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rows: int
    dim: int
    pooling_factor: float = 1.0
    pooling: str = "sum"
    features: tuple[str, ...] = ()


class _TablesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tables: dict[str, _TableKeys]


def read_tables(path: Path) -> "tuple[tuple[TrainedTable, ...], Mapping[str, float]]":
    """Read a tables file.

    Returns:
        Its tables, and their pooling factors by name.

    Raises:
        ConfigurationError: the file cannot be read, or a key of a table is wrong. The message names both.
    """
    described = read_toml(path, _TablesFile).tables
    if not described:
        raise ConfigurationError(f"{path}: expected a table such as [tables.item], got none")
    tables = tuple(_table(f"{path}: table {name!r}", name, keys) for name, keys in described.items())
    features = [feature for table in tables for feature in table.features]
    if repeated := {feature for feature in features if features.count(feature) > 1}:
        raise ConfigurationError(f"{path}: feature {min(repeated)!r}: expected it in one table, got it in several")
    return tables, {name: keys.pooling_factor for name, keys in described.items()}


def _table(where: str, name: str, keys: _TableKeys) -> "TrainedTable":
    from export.trained.tables import TrainedTable  # imports torch, which most commands do not need

    if keys.rows < 1 or keys.dim < 4 or keys.dim % 4 or keys.rows * keys.dim > MOST_BYTES:
        raise ConfigurationError(
            f"{where}: expected rows > 0 and a dim that is a multiple of 4, and no more than {MOST_BYTES} elements, "
            f"got {keys.rows} × {keys.dim}"
        )
    if not 0 < keys.pooling_factor < 1e6:
        raise ConfigurationError(
            f"{where}: pooling_factor: expected > 0 and below 1000000, got {keys.pooling_factor}"
        )
    pooling = {"sum": Pooling.SUM, "mean": Pooling.MEAN}.get(keys.pooling.lower())
    if pooling is None:
        raise ConfigurationError(f"{where}: pooling: expected sum or mean, got {keys.pooling!r}")
    return TrainedTable(
        name=name,
        key=name,
        rows=keys.rows,
        dim=keys.dim,
        pooling=pooling,
        weighted=False,
        features=keys.features or (name,),
        keys=keys.features or (name,),
    )
