"""The options of `tbe-serve configure` that come from the table of settings: one for each, and its `--no-` form."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field
from typing import Annotated, Any

import typer

from serving.model.settings import ServingSettings, Setting, kind_of, table
from serving.terminal.options import by_name, named, shared_options, with_options


def _changes(before: ServingSettings, **typed: Any) -> dict[str, Any]:
    given = {each.name: typed[each.name] for each, _ in table() if typed[each.name] is not None}
    for each, setting in table():
        if kind_of(each) is Mapping and each.name in given:
            values = given[each.name]
            may_lack_name = (setting.metavar or "").startswith("[")
            added = by_name(values) if may_lack_name else named(setting.flag or f"--{each.name}", values)
            given[each.name] = (getattr(before, each.name) or {}) | added
    unset = [each.name for each, setting in table() if setting.unset and typed[f"no_{each.name}"]]
    return given | dict.fromkeys(unset)


def _options(each: Field[Any], setting: Setting) -> Iterator[tuple[str, tuple[Any, Any]]]:
    kind: Any = setting.typed or kind_of(each)
    option = f"--{each.name.replace('_', '-')}"
    names = [f"{option}/--no-{option[2:]}"] if kind is bool else [setting.flag] if setting.flag else []
    typed = list[str] if kind is Mapping else kind
    yield each.name, (Annotated[typed | None, typer.Option(*names, metavar=setting.metavar, help=setting.help)], None)
    if setting.unset:
        yield f"no_{each.name}", (Annotated[bool, typer.Option(f"--no-{option[2:]}", help=setting.unset)], False)


ChangesOf = Callable[[ServingSettings], dict[str, Any]]
# A command calls `changes(before)`: the settings that were typed, as arguments of ServingSettings. None unsets one.
# What is given by name is added to what `before` has.
takes_settings = shared_options(
    "changes", with_options(_changes, dict(option for each in table() for option in _options(*each)))
)
