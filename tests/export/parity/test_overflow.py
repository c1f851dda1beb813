"""Numbers at the end of what a dtype holds."""

from pathlib import Path

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from export import ExportConfig, OutputDtype, WeightDtype, export_model
from serving.bundle.load import open_bundle
from serving.engine import Engine
from tests.support.wrapped_collections import pooled


def test_the_largest_fp32_numbers_are_answered_as_torchrec_does(tmp_path: Path) -> None:
    module = pooled()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_().sign_().mul_(1e38)
    engine = Engine.open(export_model(module, tmp_path / "r", "m", ExportConfig(dtype={"*": WeightDtype.FP32})))
    kjt = KeyedJaggedTensor.from_lengths_sync(["fa", "fb"], torch.arange(9), torch.tensor([1, 5, 3, 0]))
    expected = module(kjt).to_dict()
    for name, rows in engine.lookup(kjt).items():
        np.testing.assert_array_equal(rows, expected[name].detach().numpy())


def test_possibly_infinite_fp16_answers_are_noted(tmp_path: Path) -> None:
    module = pooled()
    with torch.no_grad():
        module.embedding_bags["b"].weight[3, 2] = 30_000.0
    half = ExportConfig(dtype={"*": WeightDtype.FP32}, output_dtype=OutputDtype.FP16)
    bundle = export_model(module, tmp_path / "r", "m", half)
    (note,) = open_bundle(bundle).manifest.notes
    assert note.startswith("table 'b': FP16 answers can be infinity: its largest element is 3e+04, and 3 of it")
    answer = Engine.open(bundle).lookup({"fb": [[3, 3], [3, 3, 3]]})["fb"]
    assert answer[0, 2] == 60_000
    assert np.isposinf(answer[1, 2])
    assert open_bundle(export_model(module, tmp_path / "r", "full")).manifest.notes == ()
