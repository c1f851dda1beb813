"""Pages of reference that are written from the code: commands, and the Python API."""

from importlib import import_module

from typer import Typer
from typer.testing import CliRunner

from export.__main__ import app as tbe_export
from serving.__main__ import app as tbe_serve

_WIDTH = 100
# The modules that users import, and the names that the page of each begins with. Those of `__all__` follow.
_API = {
    "export": ("export", ["export_model", "ExportConfig", "Sharding"]),
    "client": ("serving.client", ["LookupClient", "AsyncLookupClient"]),
    "engine": ("serving.engine", ["Engine"]),
}


def reference_pages() -> dict[str, str]:
    """Markdown of each page, by its path in the site."""
    pages = {
        f"commands/{name}.md": _commands_page(name, app)
        for name, app in (("tbe-export", tbe_export), ("tbe-serve", tbe_serve))
    }
    return pages | {f"api/{page}.md": _api_page(module, first) for page, (module, first) in _API.items()}


def _commands_page(program: str, app: Typer) -> str:
    """The help text of a program, and of each of its commands in a section."""
    commands = [
        command.callback.__name__.replace("_", "-") for command in app.registered_commands if command.callback
    ]
    sections = [
        f"# {program}",
        _help(app, []),
        *(f"## {program} {name}\n\n{_help(app, [name])}" for name in commands),
    ]
    return "\n\n".join(sections) + "\n"


def _help(app: Typer, arguments: list[str]) -> str:
    result = CliRunner().invoke(app, [*arguments, "--help"], terminal_width=_WIDTH, env={"COLUMNS": str(_WIDTH)})
    if result.exit_code:
        raise RuntimeError(f"{arguments} --help: exit code {result.exit_code}: {result.output}")
    return f"```text\n{result.output.strip()}\n```"


def _api_page(module: str, first: list[str]) -> str:
    """A page from the docstrings of a module's names. mkdocstrings fills it."""
    names = dict.fromkeys([*first, *getattr(import_module(module), "__all__", [])])
    sections = [f"::: {module}.{name}" for name in names]
    return "\n\n".join([f"# {module}", *sections]) + "\n"
