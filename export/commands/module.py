"""The trained module that a command works on: `--model package.module:function`."""

import importlib
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from export.errors import ModelError
from serving.errors import ConfigurationError

ModelOption = Annotated[str, typer.Option(help="package.module:function that builds the module, without arguments.")]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        help="A state dict of torch.save, safetensors, or a torch.distributed.checkpoint folder; "
        "by default the module's own weights."
    ),
]
SigningKeyOption = Annotated[
    Path | None,
    typer.Option(help="PEM file with the Ed25519 private key that signs the bundle, and a new model's settings."),
]


def build_module(spec: str, *, meta: bool) -> nn.Module:
    """Call the function that `spec` names.

    Args:
        spec: `package.module:function`.
        meta: build the module on the meta device, where tables take no memory.

    Raises:
        ConfigurationError: there is no such function, or it takes arguments.
        ModelError: the function raised something, or returned no module.
    """
    package, _, function = spec.partition(":")
    sys.path.insert(0, "")  # as `python -m` does, so that modules in the working directory are found
    try:
        build = getattr(importlib.import_module(package), function)
        with torch.device("meta" if meta else "cpu"):
            module = build()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        said = f"{type(error).__name__}: {error}"
        if place := _last_own_line(error):
            raise ModelError(f"--model {spec}: {said} ({place}); --verbose shows how it came there") from error
        raise ConfigurationError(
            f"--model {spec}: expected package.module:function, without arguments: {said}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"--model {spec}: expected a torch.nn.Module, got {type(module).__name__}")
    return module


def _last_own_line(error: BaseException) -> str | None:
    """The last line of the user's own code that `error` passed, "file:line"; None where it passed none."""
    installed = (*sysconfig.get_paths().values(), str(Path(__file__).parents[1]), "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(installed)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None
