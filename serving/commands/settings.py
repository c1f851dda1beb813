"""The options of `tbe-serve configure` that come from the table of settings: one for each, and its `--no-` form."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field
from typing import Annotated, Any

import typer

from serving.model.settings import Setting, kind_of, table


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each setting, behind its arguments. It gets them as its `**typed`."""
    own = [each for each in inspect.signature(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
    arguments = [each for each in own if each.kind is not each.KEYWORD_ONLY]
    options = [option for each, setting in table() for option in _options(each, setting)]
    command.__signature__ = inspect.Signature([*arguments, *options, *own[len(arguments) :]])  # type: ignore[attr-defined]
    return command


def changes(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were typed, as arguments of ServingSettings. None unsets one."""
    given = {each.name: typed[each.name] for each, _ in table() if typed[each.name] is not None}
    unset = [each.name for each, setting in table() if setting.unset and typed[f"no_{each.name}"]]
    return given | dict.fromkeys(unset)


def _options(each: Field[Any], setting: Setting) -> Iterator[inspect.Parameter]:
    kind = setting.typed or kind_of(each)
    option = f"--{each.name.replace('_', '-')}"
    names = [f"{option}/--no-{option[2:]}"] if kind is bool else []
    yield _parameter(each.name, kind | None, None, typer.Option(*names, help=setting.help))
    if setting.unset:
        yield _parameter(f"no_{each.name}", bool, False, typer.Option(f"--no-{option[2:]}", help=setting.unset))


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )
