"""A progress bar while a command works. Without a terminal there is none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as bars

from export.progress import Progress
from serving.terminal.program import err

# Takes the step that is being done, how much is done, and how much there is.
Show = Callable[[str, int, int], None]


@contextmanager
def progress_bar(width: int, first: str, *columns: bars.ProgressColumn) -> Iterator[Show]:
    """Show a bar.

    Args:
        width: the characters for the name of a step.
        first: the first step.
        columns: what stands behind the bar.
    """
    with bars.Progress(
        bars.TextColumn(f"{{task.description:<{width}}}", markup=False),
        bars.BarColumn(),
        *columns,
        console=err,
        transient=True,
        disable=not err.is_terminal,
    ) as bar:
        task = bar.add_task(first, total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


@contextmanager
def export_progress() -> Iterator[Callable[[Progress], None]]:
    """Show a bar for an export, in bytes."""
    columns = (bars.DownloadColumn(binary_units=True), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with progress_bar(16, "reading", *columns) as show:
        yield lambda progress: show(progress.step, progress.done, progress.total)
