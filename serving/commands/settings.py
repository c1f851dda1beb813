"""The options of `tbe-serve configure` that come from the table of settings: one for each, and its `--no-` form."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field
from typing import Annotated, Any

import typer

from serving.model.settings import ServingSettings, Setting, kind_of, table
from serving.terminal.options import by_name


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each setting, behind its arguments. It gets them as its `**typed`."""
    own = [each for each in inspect.signature(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
    arguments = [each for each in own if each.kind is not each.KEYWORD_ONLY]
    options = [option for each, setting in table() for option in _options(each, setting)]
    command.__signature__ = inspect.Signature([*arguments, *options, *own[len(arguments) :]])  # type: ignore[attr-defined]
    return command


def changes(typed: Mapping[str, Any], before: ServingSettings) -> dict[str, Any]:
    """The settings that were typed, as arguments of ServingSettings. None unsets one.

    Args:
        typed: the values of the options.
        before: the settings so far. What is given by name is added to what they have.
    """
    given = {each.name: typed[each.name] for each, _ in table() if typed[each.name] is not None}
    for each, _ in table():
        if kind_of(each) is Mapping and each.name in given:
            given[each.name] = (getattr(before, each.name) or {}) | by_name(given[each.name])
    unset = [each.name for each, setting in table() if setting.unset and typed[f"no_{each.name}"]]
    return given | dict.fromkeys(unset)


def _options(each: Field[Any], setting: Setting) -> Iterator[inspect.Parameter]:
    kind: Any = setting.typed or kind_of(each)
    option = f"--{each.name.replace('_', '-')}"
    names = [f"{option}/--no-{option[2:]}"] if kind is bool else [setting.flag] if setting.flag else []
    typed = list[str] if kind is Mapping else kind
    yield _parameter(each.name, typed | None, None, typer.Option(*names, metavar=setting.metavar, help=setting.help))
    if setting.unset:
        yield _parameter(f"no_{each.name}", bool, False, typer.Option(f"--no-{option[2:]}", help=setting.unset))


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )
