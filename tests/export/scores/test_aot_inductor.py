"""A dense part is compiled to native code on request, checked like the other formats, and served where it fits."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from export import DenseCompiler, ExportConfig, export_model, prepare
from export.errors import ModelError
from export.parity.verify import verify
from export.scores import aot_inductor, dense_formats
from serving.bundle.load import open_bundle
from serving.bundle.scores import DenseFile, DenseFormat
from serving.engine import Engine
from serving.errors import ConfigurationError
from serving.lookup.aot_inductor import LIBRARY, OPERATORS
from serving.lookup.dense_files import load_dense_file
from serving.lookup.dense_program import DenseProgram
from tests.models.registry import example_of, module_of
from tests.models.test_models import compare
from tests.support.scored_models import EXACT, dlrm

NATIVE = replace(EXACT, compile=DenseCompiler.AOTI)


def test_native_code_without_scores_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^compile \(--compile\): expected --scores beside it"):
        ExportConfig(compile=DenseCompiler.AOTI)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "g++"])
def test_a_missing_compiler_is_named_before_the_export_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setattr(aot_inductor, "misfit", lambda _: None)
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigurationError, match=rf"expected a C\+\+ compiler, '{compiler.replace('+', '.')}' is not"
    ):
        export_model(dlrm(), tmp_path / "r", "m", NATIVE)
    assert not (tmp_path / "r").exists()


def test_a_processor_that_cannot_run_the_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot_inductor, "misfit", lambda _: "this processor has no avx2")
    with pytest.raises(
        ConfigurationError, match=r"could not be compared with the model here: this processor has no avx2"
    ):
        export_model(dlrm(), tmp_path / "r", "m", NATIVE)


@pytest.fixture
def has_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: the tests replace the compiler's work."""
    file = DenseFile("scores.x.zip", DenseFormat.AOTINDUCTOR, instructions="x86-64-v3", torch=str(torch.__version__))
    monkeypatch.setattr(prepare, "compiled_file", lambda: file)


@pytest.mark.usefixtures("has_compiler")
def test_a_compiler_that_fails_is_named_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise RuntimeError("C++ compile error\n\nCommand:\ng++")

    monkeypatch.setattr(dense_formats, "compile_to_native", fail)
    expected = (
        r"^DLRM: its forward cannot be compiled to native code, export it without --compile: C\+\+ compile error$"
    )
    with pytest.raises(ModelError, match=expected):
        export_model(dlrm(), tmp_path / "r", "m", NATIVE)


@pytest.mark.usefixtures("has_compiler")
def test_code_that_answers_differently_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model's code, in place of the compiler's."""
    monkeypatch.setattr(dense_formats, "compile_to_native", lambda exported, _: exported)

    def load_other(format_: DenseFormat, content: bytes) -> object:
        forward = load_dense_file(
            DenseFormat.EXPORTED_PROGRAM if format_ is DenseFormat.AOTINDUCTOR else format_, content
        )
        if format_ is not DenseFormat.AOTINDUCTOR:
            return forward
        return lambda *inputs: [scores + 0.01 for scores in forward(*inputs)]

    monkeypatch.setattr(dense_formats, "load_dense_file", load_other)
    with pytest.raises(
        ModelError, match=r"native code, export it without --compile: output 'scores': it is off by 0.01"
    ):
        export_model(dlrm(), tmp_path / "r", "m", NATIVE)


@pytest.mark.long
@pytest.mark.usefixtures("fresh_process")
@pytest.mark.parametrize("name", ["squeezed_answer", "jagged_to_dense"])
def test_native_code_answers_as_the_model_does(tmp_path: Path, name: str) -> None:
    """Alone and merged with others, for one sample and more. It has no path of the model's code."""
    module = module_of(name)
    bundle = export_model(module, tmp_path / "r", "m", NATIVE, example=example_of(name, 6))
    part = open_bundle(bundle).manifest.dense_part
    assert part is not None
    (file,) = (file for file in part.files if file.format is DenseFormat.AOTINDUCTOR)
    assert "aot_inductor" in json.loads((bundle / "manifest.json").read_text())["requires"]
    engine = Engine.open(bundle)
    engine._dense = DenseProgram(engine.bundle, engine.schema, file)  # type: ignore[arg-type]
    compare(engine, name, module, (1, 2, 3, 7, 8))
    with zipfile.ZipFile(bundle / file.name) as archive:
        operators = [OPERATORS] if name == "jagged_to_dense" else []
        assert sorted(archive.namelist()) == [*operators, LIBRARY]
        library = archive.read(LIBRARY)
    for word in (b".debug_info", b"answers.py", b"sequences.py", str(tmp_path).encode()):
        assert word not in library
    assert not verify(bundle).failures
