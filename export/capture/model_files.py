"""The files of a model's code, and temporary replacements of functions and methods."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from export.trained.source_location import is_user_code


@contextmanager
def patched(owner: Any, **replacements: Any) -> Iterator[None]:
    """In the block, a class has other methods, or a module has other functions."""
    originals = {name: vars(owner)[name] for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(owner, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def files_of_model(model: nn.Module) -> list[ModuleType]:
    """The Python modules of a model's classes, and of the functions and classes that these modules name.

    Of installed packages, only the packages of the model's own classes count. A module that `sys.modules` has under
    several names is listed once.
    """
    names = [kind.__module__ for part in model.modules() for kind in type(part).__mro__]
    packages = {_package(name) for name in names}
    visited = set[str]()
    files: dict[int, ModuleType] = {}
    while names:
        name = names.pop()
        if name in visited:
            continue
        visited.add(name)
        module = sys.modules.get(name)
        if not isinstance(module, ModuleType) or not _is_file_of_user(module, name, packages):
            continue
        files[id(module)] = module
        for value in list(vars(module).values()):
            imported_from = getattr(value, "__module__", getattr(value, "__name__", None))
            if isinstance(imported_from, str):
                names.append(imported_from)
    return list(files.values())


def _is_file_of_user(module: ModuleType, name: str, packages: set[str]) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file or _package(name) in sys.stdlib_module_names:
        return False
    path = Path(file)
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return (_package(name) in packages or not is_installed) and is_user_code(path)


def _package(name: str) -> str:
    return name.partition(".")[0]
