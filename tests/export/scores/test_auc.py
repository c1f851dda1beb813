"""The AUC of scores on samples with labels, against TorchMetrics, and against the model run by TorchRec."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from export import ExportConfig, Sharding, WeightDtype, export_model, pipeline
from export.errors import ExportError
from export.scores.auc import auc_of, with_labelled_auc
from export.scores.dense_part import CompiledDensePart
from export.scores.labelled_requests import read_labelled
from serving.bundle.load import open_bundle
from serving.engine import Engine
from serving.errors import ConfigurationError
from tests.support.commands import tbe_export
from tests.support.long_cases import one_in
from tests.support.scored_models import EXACT, dlrm, own_scores, random_request, trained, two_tower

INT2 = replace(EXACT, dtype={"*": WeightDtype.INT2})


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_auc_is_that_of_torchmetrics(samples: list[tuple[int, bool]]) -> None:
    """With few different scores, so that many are equal."""
    from torchmetrics.functional.classification import binary_auroc

    scores, labels = np.array([score for score, _ in samples]) / 8, np.array([label for _, label in samples])
    if labels.all() or not labels.any():
        return
    expected = binary_auroc(torch.from_numpy(scores).sigmoid(), torch.from_numpy(labels).long())
    assert auc_of(scores, labels) == pytest.approx(float(expected), abs=1e-6)


def lines_of(module: nn.Module, label: Callable[[Mapping[str, Any]], Any]) -> list[dict[str, Any]]:
    """Requests of several sizes, with labels made of the model's own scores."""
    lines = []
    for seed, samples in enumerate((30, 1, 50)):
        bags, dense = random_request(module, np.random.default_rng(seed), samples)
        plain = {name: rows.tolist() for name, rows in dense.items()}
        lines.append({"features": bags, "dense": plain, "label": label(own_scores(module, bags, dense))})
    return lines


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def noisy(scores: Any) -> list[int]:
    """Labels that follow scores, not always."""
    random = np.random.default_rng(len(scores))
    return (scores.ravel() + random.normal(size=scores.size) * scores.std() > scores.mean()).astype(int).tolist()  # type: ignore[no-any-return]


def expected_auc(bundle: Path, module: nn.Module, lines: list[Any], output: str, label: Callable[[Any], Any]) -> Any:
    """(served, trained) by TorchMetrics: from an engine of the published bundle, and the model itself."""
    from torchmetrics.functional.classification import binary_auroc

    engine = Engine.open(bundle)
    served, trained, labels = [], [], []
    for line in lines:
        dense = {name: np.array(rows, np.float32) for name, rows in line["dense"].items()}
        served.append(engine.score(line["features"], dense)[output].ravel())
        trained.append(own_scores(module, line["features"], dense)[output].ravel())
        labels.append(label(line["label"]))
    target = torch.tensor(np.concatenate(labels))
    return [
        float(binary_auroc(torch.tensor(np.concatenate(scores)).double().sigmoid(), target))
        for scores in (served, trained)
    ]


def auc_of_output(bundle: Path, name: str = "scores") -> Any:
    """A LabelledAuc, or None."""
    part = open_bundle(bundle).manifest.dense_part
    assert part is not None
    (aucs,) = (output.parity.auc for output in part.outputs if output.name == name)
    return aucs


@dataclass(frozen=True)
class Measured:
    """A bundle that was exported with labelled lines, and its dense part as the export had it."""

    module: nn.Module
    bundle: Path
    scored: CompiledDensePart
    lines: list[dict[str, Any]]
    file: Path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    module, folder = trained(dlrm()), tmp_path_factory.mktemp("measured")
    lines = lines_of(module, lambda scores: noisy(scores["scores"]))
    file = write(folder / "sample.jsonl", lines)
    parts: list[CompiledDensePart] = []

    def measure(directory: Path, scored: CompiledDensePart, *arguments: Any) -> Any:
        parts.append(scored)
        return with_labelled_auc(directory, scored, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "with_labelled_auc", measure)
        bundle = export_model(module, folder / "r", "m", replace(EXACT, labelled=file))
    return Measured(module, bundle, parts[0], lines, file)


def test_the_auc_of_the_bundle_and_of_the_trained_model_are_stored(measured: Measured, tmp_path: Path) -> None:
    module, lines, aucs = measured.module, measured.lines, {}
    int2 = export_model(module, tmp_path / "r", "int2", replace(INT2, labelled=measured.file))
    for name, bundle in (("exact", measured.bundle), ("int2", int2)):
        served, auc_of_model = expected_auc(bundle, module, lines, "scores", lambda label: label)
        aucs[name] = auc = auc_of_output(bundle)
        assert auc.samples == 81
        assert auc.served == pytest.approx(served, abs=1e-6)
        assert auc.trained == pytest.approx(auc_of_model, abs=1e-6)
        shown = tbe_export("inspect", str(bundle)).stdout
        assert f"{auc.served:.5f}" in shown
        assert "AUC on labelled samples" in shown
    assert aucs["exact"].served == pytest.approx(aucs["exact"].trained, abs=1e-3)
    assert aucs["int2"].served != aucs["int2"].trained
    assert 0.6 < aucs["exact"].served < 1


def test_labels_by_output_and_outputs_with_several_numbers(tmp_path: Path) -> None:
    module = trained(two_tower())
    lines = lines_of(module, lambda scores: {"match": noisy(scores["match"])})
    file = write(tmp_path / "sample.jsonl", lines)
    bundle = export_model(module, tmp_path / "r", "m", replace(EXACT, labelled=file))
    auc = auc_of_output(bundle, "match")
    assert auc is not None
    served, auc_of_model = expected_auc(bundle, module, lines, "match", lambda label: label["match"])
    assert (auc.served, auc.trained) == (pytest.approx(served, abs=1e-6), pytest.approx(auc_of_model, abs=1e-6))
    assert auc_of_output(bundle, "queries") is None
    assert tbe_export("verify", str(bundle)).exit_code == 0


@pytest.mark.parametrize("memory", one_in(2, ["1MB", "0"]))
def test_a_model_with_a_checkpoint_is_measured_if_it_fits_in_memory(
    measured: Measured, tmp_path: Path, memory: str
) -> None:
    torch.save(measured.module.state_dict(), tmp_path / "saved")
    done = tbe_export(
        *(
            "model",
            "--model",
            "tests.support.scored_models:dlrm",
            "--checkpoint",
            str(tmp_path / "saved"),
            "--scores",
        ),
        *("--repository", str(tmp_path / "r"), "--name", "m", "--dtype", "fp32", "--labelled", str(measured.file)),
        *("--trained-memory", memory),
    )
    assert done.exit_code == 0, done.stderr
    auc = auc_of_output(tmp_path / "r" / "m" / "1")
    exact = auc_of_output(measured.bundle)
    assert auc is not None
    assert exact is not None
    assert (auc.samples, auc.served, auc.trained) == (81, exact.served, exact.trained if memory == "1MB" else None)
    assert f"{auc.served:.5f}" in done.stdout


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda _: [], "sample.jsonl: expected lines such as"),
        (lambda _: ["no"], "sample.jsonl: line 1: expected {"),
        (lambda lines: [lines[0], {**lines[1], "labels": [1]}], "sample.jsonl: line 2: expected {"),
        (lambda lines: [{**lines[0], "label": [1]}], "line 1: label: expected 0 or 1 for each of 30 samples"),
        (lambda lines: [{**lines[1], "label": [2]}], "line 1: label: expected 0 or 1 for each of 1 samples"),
        (lambda lines: [{**lines[1], "label": 1}], "line 1: label: expected 0 or 1 for each of 1 samples"),
        (lambda lines: [{**lines[1], "label": [1]}], "output 'scores': expected labels 0 and 1, all are the same"),
        (lambda lines: [{**lines[1], "label": {"buy": [1]}}], "line 1: label 'buy': expected one of the outputs 'scores'"),
        (lambda lines: [lines[0], {**lines[1], "label": {}}], "line 2: label: expected labels for 'scores', as the first line has"),
        (lambda lines: [{**lines[1], "features": {"f0": [[1]]}}], "line 1: feature 'f1': expected all features"),
        (lambda lines: [{**lines[1], "features": {**lines[1]["features"], "f2": [[999]]}}], "line 1: feature 'f2': expected an id in [0, 102), got 999"),
        (lambda lines: [{**lines[1], "dense": {}}], "line 1: dense"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_by_its_line(
    change: Callable[[list[Any]], list[Any]], why: str, measured: Measured, tmp_path: Path
) -> None:
    file = write(tmp_path / "sample.jsonl", change(measured.lines))
    with pytest.raises((ConfigurationError, ExportError)) as refused:
        with_labelled_auc(measured.bundle, measured.scored, measured.scored.part, read_labelled(file))
    assert why in str(refused.value)


def test_an_unusable_labelled_file_fails_the_export(measured: Measured, tmp_path: Path) -> None:
    file = write(tmp_path / "sample.jsonl", [{**measured.lines[1], "dense": {}}])
    with pytest.raises(ConfigurationError, match="line 1: dense"):
        export_model(measured.module, tmp_path / "r", "m", replace(EXACT, labelled=file))
    assert not [*(tmp_path / "r").glob("m/1*")]


def test_labelled_rows_are_refused_where_no_score_can_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"labelled \(--labelled\): expected --scores beside it"):
        ExportConfig(labelled=tmp_path)
    with pytest.raises(ConfigurationError, match=r"labelled .* expected no --hosts-as-models beside it"):
        ExportConfig(scores=True, labelled=tmp_path, sharding=Sharding(ranks=2, hosts_as_models=True))
    with pytest.raises(ConfigurationError, match=r"nowhere: cannot be read"):
        export_model(dlrm(), tmp_path, "m", replace(EXACT, labelled=tmp_path / "nowhere"))


def test_blank_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    line = {"features": {}, "dense": {}, "label": [1]}
    file = tmp_path / "sample.jsonl"
    file.write_text(f"\n{json.dumps(line)}\n \t\n{json.dumps(line)}\n\n")
    assert [labelled.where.rpartition(": ")[2] for labelled in read_labelled(file)] == ["line 2", "line 4"]
    file.write_text(f"{json.dumps(line)}\n\nno\n")
    with pytest.raises(ConfigurationError, match="line 3: expected JSON"):
        read_labelled(file)
    file.write_text("\n\n")
    with pytest.raises(ConfigurationError, match=r"expected lines such as .*, got none"):
        read_labelled(file)
