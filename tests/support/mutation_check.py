"""Exports leave the models and examples that they are given as they were: after `watch`, each of a process is looked at.

Whoever imports `export_model` and the like afterwards has those that look. Nothing here imports torch before they do.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# What takes a model, by the module that has it.
EXPORTS = {
    "export.pipeline": ("export_model", "plan_model"),
    "export.machines": ("export_hosts", "complete_hosts"),
}


def watch() -> None:
    """From now on, exports that this process imports look."""
    assert not EXPORTS.keys() & sys.modules.keys(), "an export was imported before"
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, _: ModuleType | None = None) -> ModuleSpec | None:
        if name not in EXPORTS or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name in EXPORTS[module.__name__]:
            setattr(module, name, _compared(getattr(module, name)))


def _compared(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        from torch import nn

        modules = [argument for argument in (module, kwargs.get("dense")) if isinstance(argument, nn.Module)]
        before = [dict(_state(part)) for part in modules]
        configs = [arg.example for arg in (*args, *kwargs.values()) if hasattr(arg, "example")]
        example = [kwargs.get("example"), *configs]
        of_example = dict(example_state(example))
        try:
            return function(module, *args, **kwargs)
        finally:
            for part, state in zip(modules, before, strict=True):
                assert_unchanged(part, state)
            assert_example_unchanged(example, of_example)

    return called


def assert_unchanged(module: "nn.Module", before: dict[str, Any]) -> None:
    """Its parts are the same objects, with the same numbers, gradients, hooks and modes."""
    after = dict(_state(module))
    assert list(after) == list(before), f"the export changed which parts {type(module).__name__} has"
    changed = [name for name, state in before.items() if not _same(state, after[name])]
    assert not changed, f"the export changed {changed} of {type(module).__name__}"


def _state(module: "nn.Module") -> Iterator[tuple[str, Any]]:
    """All that a model is, by name. Objects are held, so that no other gets the identity of one."""
    for path, part in module.named_modules(remove_duplicate=False):
        for name, value in vars(part).items():
            yield f"{path}.{name}", value
            if isinstance(value, dict):
                yield f"{path}.{name}: keys", list(value)
                yield f"{path}.{name}: values", list(value.values())
            if isinstance(value, list | set | tuple):
                yield f"{path}.{name}: each", list(value)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        yield f"{name}: numbers", tensor.detach().clone()
        yield f"{name}: of it", [tensor.requires_grad, tensor.grad, tensor._version]


def assert_example_unchanged(example: Any, before: dict[str, Any]) -> None:
    """It has the same objects in the same places, and its tensors the same numbers and gradients."""
    after = dict(example_state(example))
    assert list(after) == list(before), "the export changed what the example has"
    changed = [name for name, state in before.items() if not _same(state, after[name])]
    assert not changed, f"the export changed {changed} of the example"


def example_state(value: Any, path: str = "example") -> Iterator[tuple[str, Any]]:
    """All that an example is, by path. Objects are held, so that no other gets the identity of one."""
    from torch import Tensor

    yield path, value
    if isinstance(value, Tensor):
        yield f"{path}: numbers", value.detach().clone()
        if value.grad is not None:
            yield f"{path}: gradient", value.grad.clone()
        yield (
            f"{path}: of it",
            [value.requires_grad, value.grad, value._version, value._backward_hooks, len(vars(value))],
        )
        return
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        yield f"{path}: keys", list(value)
        parts = [(repr(key), element) for key, element in value.items()]
    elif isinstance(value, list | tuple):
        yield f"{path}: length", len(value)
        parts = [(str(number), element) for number, element in enumerate(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield f"{path}: fields", list(vars(value))
        parts = list(vars(value).items())
    for name, part in parts:
        yield from example_state(part, f"{path}.{name}")


def _same(one: Any, other: Any) -> bool:
    import torch
    from torch import Tensor, nn

    if isinstance(one, Tensor) and not isinstance(one, nn.Parameter) and one is not other:
        return one.is_meta or torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
    if isinstance(one, list) and one is not other:
        return len(one) == len(other) and all(a is b or (a == b) is True for a, b in zip(one, other, strict=True))
    return one is other or (type(one) in (bool, int, float, str) and one == other)
