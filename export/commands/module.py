"""The trained module that a command works on: `--model package.module:function`."""

import importlib
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from export.commands.library_warnings import is_installed
from export.errors import ModelError
from serving.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

CHECKPOINT_PREFIX_HELP = (
    "Prefix of the model's keys in --checkpoint, such as `ema.`, or '' for none. Default: the one prefix under "
    "which the checkpoint has all keys of the model."
)
TRAINED_MEMORY_HELP = (
    "With --checkpoint: run the trained model itself if its tables, as FP32, take at most this, such as 16GB. By "
    "default half of the free memory; 0 never runs it."
)
ModelOption = Annotated[
    str, typer.Option(help="package.module:function that builds the trained module. It is called without arguments.")
]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        help="Weights: a state dict by torch.save, a safetensors file, or a torch.distributed.checkpoint folder. "
        "By default the weights that the built module has."
    ),
]
CheckpointPrefixOption = Annotated[
    str | None,
    typer.Option(help=CHECKPOINT_PREFIX_HELP),
]
DeltasOption = Annotated[
    str | None,
    typer.Option(
        help="Folder or store URL of all deltas, as for `tbe-serve run --deltas`. Default: REPOSITORY.deltas."
    ),
]
SigningKeyOption = Annotated[
    Path | None,
    typer.Option(help="PEM file with the Ed25519 private key that signs what is published."),
]


def build_module(spec: str, *, meta: bool) -> "nn.Module":
    """Build a module by calling the function that `spec` names.

    Args:
        spec: `package.module:function`.
        meta: build its tables on the meta device, where they take no memory.

    Raises:
        ConfigurationError: there is no such function, or it takes arguments.
        ModelError: the function raised an error, or returned something other than a module.
    """
    from torch import nn

    with _tables_on_meta() if meta else nullcontext():
        module = _load("--model", spec)
    if not isinstance(module, nn.Module):
        raise ModelError(f"--model {spec}: expected a torch.nn.Module, got {type(module).__name__}")
    return module


def named_example(spec: str) -> tuple[Any, ...] | dict[str, Any]:
    """Load the arguments of a call that `spec` names: a tuple or a dict, or a function that returns one.

    Raises:
        ConfigurationError: there is no such name, or its value has another type.
        ModelError: the function raised an error.
    """
    example = _load("--example", spec)
    if not isinstance(example, tuple | dict):
        raise ConfigurationError(
            f"--example {spec}: expected the arguments of a call, a tuple or a dict by name, got "
            f"{type(example).__name__}: for one argument, (batch,)"
        )
    return example


def _load(option: str, spec: str) -> Any:
    """Import the value that `spec` names, `package.module:name`. If it is a function, call it.

    Random numbers are seeded, so that examples, and weights without a checkpoint, are the same in every process.
    """
    package, _, name = spec.partition(":")
    if not package or not name:
        raise ConfigurationError(f"{option} {spec}: expected package.module:function, such as {package}:build")
    sys.path.insert(0, "")  # as `python -m` does, so that modules in the working directory can be imported
    try:
        _seed()
        value = getattr(importlib.import_module(package), name)
        _seed()  # again: importing may have drawn numbers, or may have happened earlier
        return value() if option == "--model" or callable(value) else value
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        message = f"{type(error).__name__}: {error}"
        if line := _last_users_line(error):
            raise ModelError(f"{option} {spec}: {message} ({line}); --verbose shows the trace") from error
        remedy = ": run it in the folder that has it, or set PYTHONPATH"
        raise ConfigurationError(
            f"{option} {spec}: expected package.module:function, without arguments: {message}"
            f"{remedy if isinstance(error, ModuleNotFoundError) else ''}"
        ) from error


def _seed() -> None:
    import torch

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@contextmanager
def _tables_on_meta() -> Iterator[None]:
    """Inside the block, new collections are on the meta device.

    Other modules are real: some compute buffers that no checkpoint has, such as DLRM's indices of pairs.
    """
    from torchrec import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    collections: tuple[Any, ...] = (EmbeddingBagCollection, FusedEmbeddingBagCollection, EmbeddingCollection)
    inits = {kind: kind.__init__ for kind in collections}
    for kind, init in inits.items():
        kind.__init__ = _on_meta(init)
    try:
        yield
    finally:
        for kind, init in inits.items():
            kind.__init__ = init


def _on_meta(init: Callable[..., None]) -> Callable[..., None]:
    import torch

    @wraps(init)
    def init_on_meta(*args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            init(*args, **kwargs)

    return init_on_meta


def _last_users_line(error: BaseException) -> str | None:
    """The last line of the user's code in the trace of `error`, as "file:line", or None."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not is_installed(frame.filename)]
    return f"{of_user[-1].filename}:{of_user[-1].lineno}" if of_user else None
