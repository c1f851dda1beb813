"""TorchScript, which torch has deprecated: whether it works in this process, and its warnings silenced.

Nothing needs it. Where it works, a bundle's lookup is compiled with it, which takes less time for small requests.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def torchscript() -> Iterator[None]:
    """Silence the warning that TorchScript is deprecated."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):  # of torch 2.13, and of 2.14
            warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated", category=category)
        yield


def torchscript_error() -> str | None:
    """Why TorchScript does not work in this process, or None if it does.

    It compiles, saves, loads and freezes a small module. The first call takes 60 ms, later ones 5 ms. A process that
    only loads programs need not call it: loading a program shows the same error.

    Returns:
        One line: the type and the message of torch's error.
    """
    try:
        with torchscript():
            content = torch.jit.script(_Increment()).save_to_buffer()  # type: ignore[no-untyped-call]
            torch.jit.freeze(torch.jit.load(io.BytesIO(content)).eval())  # type: ignore[no-untyped-call]
    except Exception as error:
        return one_line(error)
    return None


def one_line(error: Exception) -> str:
    """The type of an error, and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class _Increment(nn.Module):
    def forward(self, numbers: Tensor) -> Tensor:
        return numbers + 1
