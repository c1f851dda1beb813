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
    "What the model's keys in --checkpoint begin with, such as `ema.`; '' is nothing. By default the only prefix "
    "that all of them have."
)
TRAINED_MEMORY_HELP = (
    "With --checkpoint: load tables of up to this size, as FP32, such as 16GB, to run the trained model itself. By "
    "default half of the free memory; 0 never runs it."
)
ModelOption = Annotated[str, typer.Option(help="package.module:function that builds the module, without arguments.")]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        help="A state dict of torch.save, safetensors, or a torch.distributed.checkpoint folder; "
        "by default the module's own weights."
    ),
]
CheckpointPrefixOption = Annotated[
    str | None,
    typer.Option(help=CHECKPOINT_PREFIX_HELP),
]
DeltasOption = Annotated[
    str | None,
    typer.Option(
        help="Folder of all deltas, or its URL in a store, as `tbe-serve run --deltas`. Default: REPOSITORY.deltas."
    ),
]
SigningKeyOption = Annotated[
    Path | None,
    typer.Option(help="PEM file with the Ed25519 private key that signs what is published."),
]


def build_module(spec: str, *, meta: bool) -> "nn.Module":
    """Call the function that `spec` names.

    Args:
        spec: `package.module:function`.
        meta: build its tables on the meta device, where they take no memory.

    Raises:
        ConfigurationError: there is no such function, or it takes arguments.
        ModelError: the function raised something, or returned no module.
    """
    from torch import nn

    with _tables_on_meta() if meta else nullcontext():
        module = _made("--model", spec)
    if not isinstance(module, nn.Module):
        raise ModelError(f"--model {spec}: expected a torch.nn.Module, got {type(module).__name__}")
    return module


def named_example(spec: str) -> tuple[Any, ...] | dict[str, Any]:
    """The arguments of a call that `spec` names: a tuple, or a dict; or a function that returns one.

    Raises:
        ConfigurationError: there is nothing of that name, or it is something else.
        ModelError: the function raised something.
    """
    found = _made("--example", spec)
    if not isinstance(found, tuple | dict):
        raise ConfigurationError(
            f"--example {spec}: expected the arguments of a call, a tuple or a dict by name, got "
            f"{type(found).__name__}: for one argument, (batch,)"
        )
    return found


def _made(option: str, spec: str) -> Any:
    """What `spec` names: `package.module:name`. A function is called.

    It draws the same random numbers in every process: for an example, and for weights without a checkpoint.
    """
    package, _, name = spec.partition(":")
    if not package or not name:
        raise ConfigurationError(f"{option} {spec}: expected package.module:function, such as {package}:build")
    sys.path.insert(0, "")  # as `python -m` does, so that modules in the working directory are found
    try:
        _seed()
        found = getattr(importlib.import_module(package), name)
        _seed()  # again: another command may have imported it before
        return found() if option == "--model" or callable(found) else found
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        said = f"{type(error).__name__}: {error}"
        if place := _last_own_line(error):
            raise ModelError(f"{option} {spec}: {said} ({place}); --verbose shows the trace") from error
        way_out = ": run it in the folder that has it, or set PYTHONPATH"
        raise ConfigurationError(
            f"{option} {spec}: expected package.module:function, without arguments: {said}"
            f"{way_out if isinstance(error, ModuleNotFoundError) else ''}"
        ) from error


def _seed() -> None:
    import torch

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@contextmanager
def _tables_on_meta() -> Iterator[None]:
    """Inside the block, new collections are on the meta device.

    Other modules are real: what they compute when they are built may be in no checkpoint, as DLRM's indices of pairs.
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
    def made(*args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            init(*args, **kwargs)

    return made


def _last_own_line(error: BaseException) -> str | None:
    """The last line of the user's own code that `error` passed, "file:line"; None where it passed none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_installed(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None
