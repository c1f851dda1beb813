"""Errors that a model's own code raises, or torch for it, become refusals of the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from export.errors import ModelError, last_line
from export.scores.trace import WAY_OUT


@contextmanager
def blamed(model: nn.Module, what: str, said: Callable[[Exception], str] = last_line) -> Iterator[None]:
    """Refuse `model` for any error in here.

    Args:
        model: the model.
        what: what it cannot do.
        said: the line of the error for the message.

    Raises:
        ModelError: naming the model, what it cannot do, what the error said, and the way out.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # its code may raise anything
        raise ModelError(f"{type(model).__name__}: {what}: {said(error)}: {WAY_OUT}") from error
