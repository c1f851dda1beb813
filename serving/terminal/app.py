"""What `tbe-serve` and `tbe-export` have in common. An error is one line on stderr that names the option typed."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, TextIO

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import Abort, TyperException

from serving.errors import ServingError
from serving.files import is_url
from serving.log import one_line
from serving.pins import not_installed, tested_versions
from serving.terminal.output import is_terminal, lost, take_over

if TYPE_CHECKING:  # a command without a bar does not wait for it
    from rich import progress as bars

# Columns of an output that is no terminal.
_NO_LIMIT = 1_000_000


def _console(stream: TextIO | None, *, stderr: bool) -> Console:
    """A console of rich that prints text as it is: [red] or :x: in the name of a model is no style.

    If the stream is no terminal, lines are not cut: a program may read them.
    """
    width = None if is_terminal(stream) else _NO_LIMIT
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


out = _console(sys.stdout, stderr=False)
err = _console(sys.stderr, stderr=True)

_TYPED = ("COMMANDLINE", "ENVIRONMENT")


def complain(program: str, message: str) -> None:
    """Print `message` on stderr as one line, without control characters."""
    print(f"{program}: {one_line(message)}", file=sys.stderr, flush=True)


def new_app(name: str, about: str) -> typer.Typer:
    """A command line without commands. Add each with `cls=Command` or a subclass."""
    app = typer.Typer(
        name=name,
        cls=_Commands,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # it would read [id, ...] as a style
        help=about,
    )
    app.callback()(_options)
    return app


# Takes the step that is being done, how much is done, and how much there is.
Show = Callable[[str, int, int], None]


@contextmanager
def progress_bar(width: int, first: str, *columns: "bars.ProgressColumn") -> Iterator[Show]:
    """Show a bar.

    Args:
        width: the characters for the name of a step.
        first: the first step.
        columns: shown after the bar.
    """
    from rich import progress as bars

    with bars.Progress(
        bars.TextColumn(f"{{task.description:<{width}}}", markup=False),
        bars.BarColumn(),
        *columns,
        console=err,
        transient=True,
        disable=not err.is_terminal,
    ) as bar:
        task = bar.add_task(first, total=None)
        yield lambda what, amount, total: bar.update(task, description=what, completed=amount, total=total)


@contextmanager
def bytes_bar(first: str) -> Iterator[Show]:
    """Show a bar in bytes."""
    from rich import progress as bars

    columns = (bars.DownloadColumn(binary_units=True), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with progress_bar(16, first, *columns) as show:
        yield show


class Command(TyperCommand):
    """A command whose errors name the options as they were typed."""

    # Exceptions that are shown as one line. Any other is a bug, and is shown with its trace.
    shown_as_line: ClassVar[tuple[type[Exception], ...]] = (ServingError, OSError)

    def get_params(self, ctx: Any) -> list[Any]:
        """The command's own options, and --verbose, which may be typed before or after the command's name."""
        return [
            *super().get_params(ctx),
            *(parameter for parameter in ctx.find_root().command.params if parameter.name == "verbose"),
        ]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line.

        An option that takes one value must not be given twice: the first value would be dropped in silence. A path
        must not be empty: it comes from an unset variable, and would mean the working directory.
        """
        typed, _, order = self.make_parser(ctx).parse_args(list(args))
        params: list[Any] = self.params
        for param in params:
            is_single = param.param_type_name == "option" and not param.is_flag and not param.multiple
            if is_single and order.count(param) > 1:
                raise typer.BadParameter("expected it once, got it twice", ctx=ctx, param=param)
            if typed.get(param.name) == "" and param.type_descriptor.is_path:
                raise typer.BadParameter("expected a path, got ''", ctx=ctx, param=param)
            if param.type_descriptor.is_path and isinstance(value := typed.get(param.name), str) and is_url(value):
                raise typer.BadParameter(
                    f"expected a path, got the URL {value}: `tbe-serve pull` fills a folder", ctx=ctx, param=param
                )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        verbose = ctx.params.pop("verbose") or ctx.find_root().params["verbose"]
        try:
            return self._invoke(ctx)
        except self.shown_as_line as error:
            if verbose:
                traceback.print_exception(error)
            raise TyperException(_naming_options(_text(error), ctx)) from error

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:  # an install without extras has only the client's packages
            extra = "export" if ctx.find_root().info_name == "tbe-export" else "server"
            raise not_installed(str(error.name), "batch" if error.name == "pyarrow" else extra) from error


class _Commands(TyperGroup):
    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
        """Run a command and exit. Without a command, show the help."""
        args = sys.argv[1:] if args is None else args
        take_over()
        try:
            code = super().main(args or ["--help"], self.name, standalone_mode=False)
        except TyperException as error:
            complain(str(self.name), error.format_message())
            code = error.exit_code
        except Abort:
            code = 1
        sys.stdout.flush()
        if (problem := lost()) is not None:
            complain(str(self.name), f"standard output: {problem.strerror}: what was printed is not complete")
        sys.exit(int(code or 0))


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda is_set: _show_versions(is_set), help="Show versions and exit."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the whole trace of an error.")] = False,
) -> None:
    pass


def _show_versions(is_set: bool) -> None:
    if is_set:
        print("\n".join(tested_versions()))
        raise typer.Exit


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def _naming_options(message: str, ctx: Any) -> str:
    """A message with the option or variable in it, if it begins with a setting or with its value."""
    for setting, option, _ in _typed(ctx):
        if re.match(rf"{setting}(?=:| ')", message):
            return option + message.removeprefix(setting)
    for _, option, values in _typed(ctx):
        if any(re.match(rf"{re.escape(value)}(?=[:/])", message) for value in values):
            return f"{option} {message}"
    return message


def _typed(ctx: Any) -> Iterator[tuple[str, str, set[str]]]:
    """Each setting that was given: its name, its option or environment variable, its values, and these as paths."""
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name)
        if param.param_type_name == "option" and source is not None and source.name in _TYPED:
            value = ctx.params.get(param.name)
            values = {str(item) or "''" for item in (value if isinstance(value, list | tuple) else [value])}
            option = param.envvar if source.name == "ENVIRONMENT" else param.opts[0]
            yield param.name, option, values | {os.path.abspath(item) for item in values}
