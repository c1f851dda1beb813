"""Modules that are not ours: a copy to follow and to run, in eval mode and in silence, and names of its parts."""

import copy
import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from torch import Tensor, nn

from export.errors import ModelError, last_line


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what TorchRec and torch log, and their warnings of each other's code."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for about in ("instance-level annotations", "quantized tensor creation functions"):
                warnings.filterwarnings("ignore", message=f".*{about}", category=UserWarning)
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            yield
    finally:
        logging.disable(disabled)


# Where a module keeps its parts, each of which is looked at by itself.
_PARTS = ("_modules", "_parameters", "_buffers")


def copied(model: nn.Module, collections: Iterable[nn.Module]) -> nn.Module:
    """A copy of `model`: modules, weights, buffers, hooks, and whatever else its modules hold.

    Args:
        model: the model.
        collections: parts of it. Their parameters and buffers are shared, not copied, because tables are large. Those
            that a layer has, too, are copied: the layer may write to them. Objects that cannot be copied are shared,
            such as a lock.

    Raises:
        ModelError: it cannot be copied.
    """
    inside = {part for collection in collections for part in collection.modules()}
    others = [part for part in model.modules() if part not in inside]
    tied = {id(each) for part in others for each in (*part._parameters.values(), *part._buffers.values())}
    of_tables = [each for part in inside for each in (*part._parameters.values(), *part._buffers.values())]
    shared: dict[int, object] = {id(each): each for each in of_tables if each is not None and id(each) not in tied}
    with suppress(Exception):  # its code may raise anything
        return copy.deepcopy(model, {**shared})
    held = [each for part in model.modules() for name, each in vars(part).items() if name not in _PARTS]
    shared |= {id(each): _alike(each) for each in held if not _copies(each, shared)}
    try:
        return copy.deepcopy(model, {**shared})
    except Exception as error:  # its code may raise anything
        raise ModelError(f"{type(model).__name__}: cannot be copied (copy.deepcopy): {last_line(error)}") from error


def _alike(value: object) -> object:
    """A tensor with the numbers of one that was computed, which torch does not copy; of anything else itself."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _copies(value: object, shared: Mapping[int, object]) -> bool:
    try:
        copy.deepcopy(value, {**shared})
    except Exception:  # it may raise anything
        return False
    return True


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into eval mode; afterwards its parts have their modes again."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def check_untouched(where: str, module: nn.Module) -> None:
    """Refuse a module whose call is more than the forward of its class."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if hooks or "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__:
        raise ModelError(
            f"{where}: has a hook, or a forward of its own, which may change what is looked up: remove it"
        )


def holds(module: nn.Module, collections: Collection[nn.Module]) -> bool:
    """Whether a collection is in `module`, or is it."""
    return any(part in collections for part in module.modules())


def named(path: str, module: nn.Module) -> str:
    """The path and the class of a module, for messages."""
    return f"{path} ({type(module).__name__})" if path else type(module).__name__


def dotted(*parts: str) -> str:
    """Join the parts of a module's path. The path of the outermost module is ""."""
    return ".".join(filter(None, parts))
