"""A dense part is TorchScript and an exported program: both answer alike, and either serves alone."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export import DenseCompiler, ExportConfig, export_model
from export.capture.dense_trace import DenseTrace
from export.errors import ModelError, ParityError
from export.parity.fresh_process import FreshProcess
from export.scores import dense_formats
from export.scores.dense_formats import CompiledFile, _fastest_first
from serving.bundle.load import open_bundle
from serving.bundle.scores import EXPORTED_SCORES, SCORES, DenseDtype, DenseFile, DenseFormat, DensePart
from serving.engine import Engine
from serving.lookup.dense_files import load_dense_file
from serving.lookup.dense_program import DenseProgram
from tests.models.registry import example_of, module_of
from tests.support.long_cases import one_in
from tests.support.no_torchscript import NoTorchScript, remove_torchscript
from tests.support.scored_models import EXACT, MODELS, WIDTHS, by_position, dlrm, even, own_scores, random_request

FILES = [SCORES, EXPORTED_SCORES]


def part_of(bundle: Path) -> DensePart:
    part = open_bundle(bundle).manifest.dense_part
    assert part is not None
    return part


def config_of(model: Callable[[], nn.Module], dtype: DenseDtype = DenseDtype.FP32) -> ExportConfig:
    return replace(EXACT, dense_widths=WIDTHS if model is by_position else {}, dense_dtype=dtype)


def own_files(bundle: Path) -> list[str]:
    return sorted(path.name for path in bundle.glob("scores*"))


class Own(nn.Module):
    """In place of a model's layers. With `halved`, TorchScript runs other code than Python."""

    def __init__(self, *, halved: bool = False) -> None:
        super().__init__()
        self.top, self.halved = nn.Linear(16, 1), halved

    def forward(self, pooled: dict[str, Tensor]) -> Tensor:
        scores: Tensor = self.top(pooled["f0"]).squeeze(1)
        if self.halved and scores.sum() > 0:
            return scores / 2
        return scores


@pytest.mark.usefixtures("fresh_process")
def test_both_formats_answer_alike(tmp_path: Path) -> None:
    """The manifest lists both with what the export measured, and no path of the model's code is in the files.

    Another process has run them.
    """
    model = dlrm().eval()
    bundle = export_model(model, tmp_path, "m", EXACT)
    part = part_of(bundle)
    assert sorted(file.name for file in part.files) == own_files(bundle) == FILES
    assert part.files[0].relative_time == 1.0
    bags, dense = random_request(model, np.random.default_rng(0), 20)
    expected = own_scores(model, bags, dense)["scores"]
    for file in part.files:
        engine = Engine.open(bundle)
        engine._dense = DenseProgram(engine.bundle, engine.schema, file)  # type: ignore[arg-type]
        np.testing.assert_allclose(engine.score(bags, dense)["scores"], expected, rtol=0, atol=1e-6)
    for word in (b"dlrm.py", b"site-packages", str(Path(__file__).parents[3]).encode()):
        assert word not in (bundle / EXPORTED_SCORES).read_bytes()


@pytest.mark.parametrize(
    ("model", "dtype"),
    one_in(
        6,
        [
            *((model, DenseDtype.FP32) for model in reversed(MODELS)),
            (by_position, DenseDtype.BF16),
            (dlrm, DenseDtype.INT8),
        ],
    ),
)
def test_scores_need_no_torchscript(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Callable[[], nn.Module], dtype: DenseDtype
) -> None:
    """A bundle that has both formats is served, and an export writes the exported program alone. Both answer alike.

    TorchScript raises. Where it is removed, torch.export of today's torch fails: it names its classes.
    """
    module = model().eval()
    bags, dense = random_request(module, np.random.default_rng(0), 20)
    both = export_model(module, tmp_path, "both", config_of(model, dtype))
    expected = Engine.open(both).score(bags, dense)
    remove_torchscript(monkeypatch, NoTorchScript.RAISES)
    alone = export_model(module, tmp_path, "alone", config_of(model, dtype))
    assert own_files(alone) == [EXPORTED_SCORES]
    assert part_of(alone).mixes_samples is part_of(both).mixes_samples
    for bundle in (both, alone):
        engine = Engine.open(bundle)
        assert engine.dense_part is not None
        assert engine.dense_part.file.name == EXPORTED_SCORES
        assert len(engine.dense_part.failures) == (bundle == both)
        for name, scores in engine.score(bags, dense).items():
            np.testing.assert_allclose(scores, expected[name], rtol=0, atol=1e-5 * np.abs(expected[name]).max())


def test_a_module_of_the_user_s_own_needs_no_torchscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_torchscript(monkeypatch, NoTorchScript.RAISES)
    dense = Own().eval()
    bundle = export_model(even(), tmp_path, "m", EXACT, dense=dense)
    assert own_files(bundle) == [EXPORTED_SCORES]
    assert part_of(bundle).mixes_samples is False
    engine = Engine.open(bundle)
    bags, _ = random_request(even(), np.random.default_rng(0), 9)
    pooled = {name: torch.from_numpy(numbers) for name, numbers in engine.lookup(bags).items()}
    with torch.no_grad():
        np.testing.assert_allclose(engine.score(bags)["scores"], dense(pooled).numpy(), rtol=0, atol=1e-6)


def test_an_exported_program_takes_one_row_and_checks_lengths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch.export asserts both that an input has two rows, which is its own assumption, and that lengths fit."""
    module: Any = module_of("sum_of_rows")
    bundle = export_model(module, tmp_path, "m", EXACT, example=example_of("sum_of_rows", 6))
    assert own_files(bundle) == FILES
    forward = load_dense_file(DenseFormat.EXPORTED_PROGRAM, (bundle / EXPORTED_SCORES).read_bytes())
    assert "did not appear" not in caplog.text  # a symbol in the graph, which torch warns of
    rows = torch.arange(24.0).reshape(3, 8)
    for lengths in ([1], [0], [0, 0], [2, 1]):
        count = sum(lengths)
        bags = torch.split(rows[:count], lengths)
        expected = module.top(torch.stack([bag.sum(dim=0) for bag in bags]))
        scores = forward(torch.empty(len(lengths), 0), torch.tensor(lengths, dtype=torch.int32), rows[:count])
        torch.testing.assert_close(scores[0], expected)
    with pytest.raises(RuntimeError, match="Runtime assertion failed for expression Eq"):
        forward(torch.empty(2, 0), torch.tensor([2, 2], dtype=torch.int32), rows)


def test_a_model_that_torch_export_cannot_trace_has_torchscript_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle says so, and is read as before there were several files."""
    dense = Own(halved=True)
    bundle = export_model(even(), tmp_path, "m", EXACT, dense=dense)
    manifest = open_bundle(bundle).manifest
    assert own_files(bundle) == [SCORES]
    assert part_of(bundle).files == ()
    assert "dense_files" not in json.loads((bundle / "manifest.json").read_text())["requires"]
    (note,) = (note for note in manifest.notes if "scores.pt2" in note)
    assert (
        note == "scores need TorchScript, without scores.pt2: a branch or loop (prim::If) that depends on its inputs"
    )
    remove_torchscript(monkeypatch, NoTorchScript.RAISES)
    with pytest.raises(
        ModelError, match=r"Own: its forward cannot be compiled: TorchScript: RuntimeError: .*; torch.exp"
    ):
        export_model(even(), tmp_path, "m", EXACT, dense=dense)


def test_an_exported_program_that_answers_differently_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = dense_formats._exported

    def other(trace: DenseTrace) -> bytes:
        weight = next(trace.module.parameters())
        with torch.no_grad():
            weight.add_(0.01)
        try:
            return exported(trace)
        finally:
            with torch.no_grad():
                weight.sub_(0.01)

    monkeypatch.setattr(dense_formats, "_exported", other)
    bundle = export_model(dlrm(), tmp_path, "m", EXACT)
    assert own_files(bundle) == [SCORES]
    assert "without scores.pt2: output 'scores': it is off by " in open_bundle(bundle).manifest.notes[-1]


@pytest.mark.parametrize(
    "format_",
    one_in(3, [DenseFormat.EXPORTED_PROGRAM, DenseFormat.TORCHSCRIPT, DenseFormat.AOTINDUCTOR]),
)
def test_a_file_that_another_process_runs_differently_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: DenseFormat
) -> None:
    scores = FreshProcess.scores

    def other(fresh: FreshProcess, file: Path, of: DenseFormat, inputs: Any) -> Any:
        return [np.add(numbers, of is format_) for numbers in scores(fresh, file, of, inputs)]

    monkeypatch.setattr(FreshProcess, "scores", other)
    config = replace(EXACT, compile=DenseCompiler.AOTI if format_ is DenseFormat.AOTINDUCTOR else None)
    with pytest.raises(ParityError, match=r"scores\..*: output 'scores': a fresh process answers differently, by 1"):
        export_model(dlrm(), tmp_path, "m", config)
    assert not (tmp_path / "m" / "1").exists()


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        pytest.param({"a": 4, "b": 1}, ["b", "a"], id="clearly faster"),
        pytest.param({"a": 4, "b": 16}, ["a", "b"], id="slower"),
        pytest.param({"a": 4}, ["a"], id="alone"),
    ],
)
def test_the_fastest_dense_file_is_listed_first(milliseconds: Mapping[str, float], expected: list[str]) -> None:
    def busy(duration: float) -> Callable[..., tuple[Tensor, ...]]:
        def forward(*_: Tensor) -> tuple[Tensor, ...]:
            end = time.thread_time() + duration / 1000
            while time.thread_time() < end:
                pass
            return ()

        return forward

    files = [
        CompiledFile(DenseFile(name, DenseFormat.TORCHSCRIPT), b"", busy(duration))
        for name, duration in milliseconds.items()
    ]
    ordered = [compiled.file for compiled in _fastest_first(files, [[torch.zeros(1)]])]
    assert [file.name for file in ordered] == expected
    if len(ordered) > 1:
        assert ordered[0].relative_time == 1.0
        assert (ordered[1].relative_time or 0) > 1.0
