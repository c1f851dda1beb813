"""The trained module itself is what answers are compared with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor, PoolingType

from export import ExportConfig, OutputDtype, WeightDtype, export_model
from export.errors import ParityError
from serving.bundle.load import open_bundle
from tests.support.wrapped_collections import Around, HashesValues, pooled


class HashesSecretly(Around):
    """In a way that cannot be traced: only running it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.hash = HashesValues()

    def forward(self, kjt: KeyedJaggedTensor) -> Any:
        self.hash(kjt)
        return self.ebc(kjt)


def test_answers_are_compared_with_the_trained_module_itself(tmp_path: Path) -> None:
    """As TorchRec runs it; what could not be run is not said to agree."""
    mean = pooled("w", weighted=True, pooling=PoolingType.MEAN)
    bundle = export_model(nn.ModuleDict({"a": pooled(), "mean": mean}), tmp_path / "r", "m")
    by_table = {parity.table: parity.trained for parity in open_bundle(bundle).manifest.parity}
    for name in ("a", "b"):
        assert (agreement := by_table[name]) is not None
        assert 0 < agreement.largest < 2
        assert agreement.cosine > 0.99
    assert by_table["w"] is None


def test_the_error_of_an_answer_is_that_of_a_single_element(tmp_path: Path) -> None:
    """However long a bag is, and whatever its weights are: `trained` can be compared with `limit`."""
    module = nn.ModuleList([pooled(), pooled("w", weighted=True)])
    config = ExportConfig(dtype={"*": WeightDtype.INT4})
    for parity in open_bundle(export_model(module, tmp_path / "r", "m", config)).manifest.parity:
        assert parity.trained is not None
        assert 0 < parity.trained.largest <= parity.quantized.largest * 1.001 <= parity.limit * 1.001
        assert parity.sharded.largest < 1e-6


def test_untraceable_changes_of_ids_are_found_by_running_the_module(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"table 'a': the trained module answers differently for feature 'fa'"):
        export_model(HashesSecretly(), tmp_path / "r", "m")
    assert list((tmp_path / "r").iterdir()) == []


@pytest.mark.parametrize("dtype", [WeightDtype.FP32, WeightDtype.FP16, WeightDtype.INT2])
@pytest.mark.parametrize("trained", [torch.float32, torch.float16, torch.bfloat16])
def test_a_module_of_any_precision_agrees_with_its_bundle(
    tmp_path: Path, dtype: WeightDtype, trained: torch.dtype
) -> None:
    module = nn.ModuleList([pooled().to(trained), pooled("c", weighted=True)])
    export_model(module, tmp_path / "r", "m", ExportConfig(dtype={"*": dtype}, output_dtype=OutputDtype.FP16))
