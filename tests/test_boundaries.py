"""Which package may import which library or package, and which files may be long: the design as rules."""

import ast
import subprocess
import sys
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What `export` takes of `serving`, and why.
EXPORT_MAY_IMPORT = {
    "serving.arguments": "configs of both sides are checked in one way",
    "serving.batch": "columns of labelled rows are named as `tbe-serve score-files` names them",
    "serving.bundle": "the format that both agree on",
    "serving.engine": "a bundle is opened and answers before it is published, as serving does it",
    "serving.errors": "configuration has one error on both sides",
    "serving.lookup": "a program is built, loaded and called as serving does it",
    "serving.tables": "weights are mapped as serving does it, and both ask how much memory there is",
    "serving.reference": "the numpy answer that programs are compared with",
    "serving.requests": "a probe is a request, checked and encoded as any other",
    "serving.delta_store": "deltas are published where servers bring them from",
    "serving.store": "a repository may be in a store, for who publishes and for who serves",
    "serving.model": "a new model gets its config.pbtxt, and [serving] its settings",
    "serving.bench": "`tbe-export compare` draws its requests and its figures as `tbe-serve bench` does",
    "serving.files": "files are read and replaced as serving does it",
    "serving.range_file": "zip files and Parquet files are read in ranges by one file",
    "serving.ordered_map": "rows are stored and files are read by one map over threads",
    "serving.terminal": "both programs speak in one way",
    "serving.pins": "both programs check the same versions",
    "serving.torchscript": "both compile where TorchScript works, and do without it elsewhere",
}
# Libraries that few packages of `serving` import: a client has no torch, and Triton's own module is in its backend alone.
FEW_IMPORT = {
    "torch": {
        "serving.backend.dlpack",
        "serving.backend.triton",
        "serving.lookup.buffer_pool",
        "serving.lookup.batch_answer",
        "serving.lookup.parallel_lookup",
        "serving.lookup.aot_inductor",
        "serving.lookup.gemm",
        "serving.lookup.dense_files",
        "serving.lookup.dense_program",
        "serving.lookup.exported_program",
        "serving.lookup.program",
        "serving.lookup.build_program",
        "serving.lookup.one_rank_program",
        "serving.lookup.sharded_program",
        "serving.lookup.rank_lookup",
        "serving.lookup.tbe_call",
        "serving.lookup.user_side",
        "serving.router.router_ranks",
        "serving.tables.table_files",
        "serving.torchscript",
    },
    "triton_python_backend_utils": {"serving.backend.triton"},
    "tritonclient": set(),
    "psutil": {"serving.triton.stubs"},
    "torchrec": set(),
    "pandas": set(),
    "polars": set(),
    "pyarrow": {
        "serving.batch.batch_scores",
        "serving.batch.folder_output",
        "serving.batch.input_types",
        "serving.batch.inputs",
        "serving.batch.part_scores",
        "serving.batch.partitions",
        "serving.batch.scorer",
    },
    "export": set(),
}

# Files of more than 400 lines, each with the reason why it is one concept.
LONG_FILES: dict[str, str] = {
    "serving.client.clients": "two clients with the same methods, each with its whole signature",
    "serving.requests.input_forms": "one table, with the function of each entry that recognises or converts a form",
    "serving.engine": "one class, whose methods say all that a caller has to know",
}


def modules() -> dict[str, Path]:
    paths = [path for package in ("export", "serving") for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it; `from m import n` as "m.n", which may be a module or not."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("library", FEW_IMPORT)
def test_few_packages_of_serving_import(library: str) -> None:
    found = {
        name
        for name, path in modules().items()
        if is_in(name, "serving") and any(is_in(name, library) for name in imports(path))
    }
    assert found == FEW_IMPORT[library]


def test_export_imports_serving_only_for_a_stated_reason() -> None:
    crossed = {
        ".".join(each.split(".")[:2])
        for name, path in modules().items()
        if is_in(name, "export")
        for each in imports(path)
        if is_in(each, "serving")
    }
    assert crossed == EXPORT_MAY_IMPORT.keys()


def test_packages_for_triton_do_not_import_their_users() -> None:
    found = {
        each
        for name, path in modules().items()
        if is_in(name, "serving.triton")
        for each in imports(path)
        if is_in(each, "serving.server") or is_in(each, "serving.client")
    }
    assert found == set()


def graph_of(name_of: Callable[[str], str]) -> dict[str, set[str]]:
    """What each file imports of ours, by what `name_of` makes of a module's name."""
    there = modules()
    graph: dict[str, set[str]] = {}
    for name, path in there.items():
        imported = {name if name in there else name.rpartition(".")[0] for name in imports(path)} & there.keys()
        graph.setdefault(name_of(name), set()).update(name_of(each) for each in imported)
    return {name: others - {name} for name, others in graph.items()}


def package_of(module: str) -> str:
    """export.rows of export.rows.quantize."""
    return ".".join(module.split(".")[:2])


def test_a_file_of_more_than_400_lines_has_a_reason() -> None:
    """A file is one concept, however long; a long one may be two, so it says why it is not."""
    long_files = {name for name, path in modules().items() if len(path.read_text().splitlines()) > 400}
    assert long_files == LONG_FILES.keys()


def test_no_function_has_more_than_60_lines() -> None:
    """Lines of the body, without the docstring."""
    functions = [
        (path.name, node.name, (body[-1].end_lineno or 0) - body[0].lineno + 1)
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (body := node.body[int(ast.get_docstring(node) is not None) :])
    ]
    assert [(file, function, lines) for file, function, lines in functions if lines > 60] == []


@pytest.mark.parametrize("name_of", [str, package_of], ids=["files", "packages"])
def test_nothing_imports_in_a_circle(name_of: Callable[[str], str]) -> None:
    try:
        TopologicalSorter(graph_of(name_of)).prepare()
    except CycleError as circle:
        pytest.fail(f"a circle of imports: {' → '.join(circle.args[1])}")


@pytest.mark.parametrize(
    "module", ["serving.client", "serving.requests.validate", "serving.bundle", "serving.server", "serving.__main__"]
)
def test_a_client_needs_no_torch(module: str) -> None:
    """Even where torch is installed, nothing of it is imported."""
    code = f"import sys, {module}; print([name for name in sys.modules if name.split('.')[0] in ('torch', 'fbgemm_gpu')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
