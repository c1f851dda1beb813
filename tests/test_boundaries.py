"""Who may import whom: the rooms of the design."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXPORT_MAY_IMPORT = {
    "serving.atomic",
    "serving.bundle",
    "serving.digests",
    "serving.encoding",
    "serving.files",
    "serving.options",
    "serving.signature",
    "serving.strict",
    "serving.template",
    "serving.temporary",
    "serving.terminal",
    "serving.engine",
    "serving.errors",
    "serving.pins",
    "serving.plan",
    "serving.dequantize",
    "serving.reference",
    "serving.load",
    "serving.kjt",
    "serving.schema",
    "serving.config_file",
    "serving.settings",
}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def package_imports(package: str) -> dict[str, set[str]]:
    folder = ROOT / package
    return {str(path.relative_to(folder)): imports(path) for path in folder.rglob("*.py")}


def uses(modules: set[str], name: str) -> bool:
    return any(module == name or module.startswith(name + ".") for module in modules)


@pytest.mark.parametrize("name", ["torchrec", "export"])
def test_serving_never_imports(name: str) -> None:
    assert [file for file, modules in package_imports("serving").items() if uses(modules, name)] == []


@pytest.mark.parametrize(
    ("name", "only"),
    [
        pytest.param(
            "tritonclient",
            {"client/clients.py", "client/exchange.py", "config_file.py", "load/generator.py", "template.py"},
            id="tritonclient",
        ),
        pytest.param("triton_python_backend_utils", {"backend.py"}, id="triton_python_backend_utils"),
        pytest.param("torch", {"backend.py", "engine.py"}, id="torch"),
        pytest.param("psutil", {"server/stubs.py"}, id="psutil"),
    ],
)
def test_few_files_of_serving_import(name: str, only: set[str]) -> None:
    assert {file for file, modules in package_imports("serving").items() if uses(modules, name)} == only


def test_export_crosses_only_where_it_may() -> None:
    for file, modules in package_imports("export").items():
        crossed = {module for module in modules if uses({module}, "serving")} - {"serving"}
        assert {".".join(module.split(".")[:2]) for module in crossed} <= EXPORT_MAY_IMPORT, file


@pytest.mark.parametrize(
    "module", ["serving.client", "serving.kjt", "serving.bundle", "serving.server", "serving.__main__"]
)
def test_a_client_needs_no_torch(module: str) -> None:
    """Even where torch is installed, nothing of it is imported."""
    code = f"import sys, {module}; print([name for name in sys.modules if name.split('.')[0] in ('torch', 'fbgemm_gpu')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
