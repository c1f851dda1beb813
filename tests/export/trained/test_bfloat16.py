"""Tables of bfloat16: in modules, and in every kind of checkpoint."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from export import ExportConfig, Sharding, WeightDtype, export_model
from export.trained.model_weights import open_weights
from export.trained.tables import collect_tables
from serving.bundle.load import open_bundle
from serving.engine import Engine
from tests.support.checkpoint_files import State, save_dcp, save_safetensors
from tests.support.commands import tbe_export
from tests.support.models import MIXED, MIXED_CONFIG, collection, flat, random_bags

FP32 = ExportConfig(dtype={"*": WeightDtype.FP32})


def save_state(state: State, path: Path) -> Path:
    torch.save(state, path / "w.pt")
    return path / "w.pt"


def save_views(state: State, path: Path) -> Path:
    """Tensors that are transposed views of wider ones."""
    wide = {key: torch.cat([torch.ones(3, len(rows)).bfloat16(), rows.T]) for key, rows in state.items()}
    return save_state({key: columns[3:].T for key, columns in wide.items()}, path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("saved", [save_state, save_views, save_safetensors, save_dcp])
def test_every_kind_of_checkpoint_keeps_bfloat16_numbers(
    tmp_path: Path, saved: Callable[[State, Path], Path]
) -> None:
    state = collection().bfloat16().state_dict()
    module = collection()
    trained = collect_tables(module)
    checkpoint = open_weights(module, trained, saved(state, tmp_path))
    for table in trained.tables:
        checkpoint.check(table)
        for start, stop in [(0, table.rows), (7, 19)]:
            rows = checkpoint.rows(table, start, stop)
            assert rows.dtype is torch.float32
            assert torch.equal(rows, state[table.key][start:stop].float())


def test_bfloat16_is_stored_as_its_numbers_in_float32_are(tmp_path: Path) -> None:
    narrow = collection().bfloat16()
    checkpoint = save_state(narrow.state_dict(), tmp_path)
    with torch.device("meta"):
        empty = collection()
    for config in (MIXED_CONFIG, ExportConfig(dtype={"*": WeightDtype.FP32}, sharding=Sharding(ranks=2))):
        result = export_model(empty, tmp_path / "r", "m", config, checkpoint=checkpoint)
        expected = export_model(collection().bfloat16().float(), tmp_path / "r", "m", config)
        for name in open_bundle(result).manifest.weights_files:
            assert (result / name).read_bytes() == (expected / name).read_bytes()
    assert tbe_export("verify", str(result)).exit_code == 0


def test_bfloat16_module_is_compared_with_torchrec(tmp_path: Path) -> None:
    module = collection(MIXED).bfloat16()
    bundle = export_model(module, tmp_path / "r", "m", FP32)
    for parity in open_bundle(bundle).manifest.parity:
        assert parity.quantized.largest == 0
        assert parity.trained is not None
        # TorchRec rounds its answers to bfloat16.
        assert 0 < parity.trained.largest < 1

    bags = random_bags(np.random.default_rng(0), MIXED, 40)
    values, lengths = (torch.from_numpy(value) for value in flat(bags))
    kjt = KeyedJaggedTensor.from_lengths_sync(list(bags), values, lengths)
    narrow, wide = (value(kjt).to_dict() for value in (module, collection(MIXED).bfloat16().float()))
    for name, answer in Engine.open(bundle).lookup(bags).items():
        np.testing.assert_allclose(answer, wide[name].detach(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(answer, narrow[name].detach(), rtol=2**-6, atol=2**-4)


def test_a_smallest_dtype_is_found_for_bfloat16(tmp_path: Path) -> None:
    bundle = export_model(collection().bfloat16(), tmp_path / "r", "m", ExportConfig(max_error={"*": 0.02}))
    for parity in open_bundle(bundle).manifest.parity:
        assert parity.quantized.largest <= 0.02


def test_bf16_data_type_takes_a_bfloat16_checkpoint(tmp_path: Path) -> None:
    """TorchRec 1.8: EmbeddingBagCollection knows FP32 and FP16. The trained rows are in the checkpoint."""
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=30,
        embedding_dim=8,
        feature_names=["x"],
        data_type=DataType.BF16,
        pooling=PoolingType.SUM,
    )
    module = EmbeddingBagCollection([config])
    rows = torch.randn(30, 8).bfloat16()
    checkpoint = save_state({"embedding_bags.t.weight": rows}, tmp_path)
    bundle = export_model(module, tmp_path / "r", "m", FP32, checkpoint=checkpoint)
    answer = Engine.open(bundle).lookup({"x": [[id_] for id_ in range(30)]})["x"]
    np.testing.assert_array_equal(answer, rows.float().numpy())
