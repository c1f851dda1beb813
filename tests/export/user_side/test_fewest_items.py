"""From how many items on a user side is used: measured at export, said on its screen, and kept in the manifest."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from export import ExportConfig, export_model
from export.commands import show
from export.relative_time import relative_time
from export.user_side import fewest_items
from serving.bundle.load import open_bundle
from tests.support.long_cases import one_in
from tests.support.models import SUM, collection
from tests.support.sequence_models import kjt_of

# The keys `x` and `y` of the user, and `z` of the items.
WIDTH = 28


class LargeUserTower(nn.Module):
    """Three layers over the user's columns, and a product with the item's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags: EmbeddingBagCollection = collection(SUM)
        self.user = nn.Sequential(nn.LazyLinear(768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 4))
        self.item = nn.LazyLinear(4)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(ids)
        answer: Tensor = (self.user(pooled["x"]) * self.item(pooled["z"])).sum(dim=1)
        return answer


def export_of_tower(repository: Path) -> Path:
    module, ids = LargeUserTower(), kjt_of({key: [[1], [2], [0]] for key in ("x", "y", "z")})
    with torch.no_grad():
        module(ids)
    return export_model(module.eval(), repository, "m", ExportConfig(scores=True, user_side=["x"]), example=(ids,))


def test_a_large_user_tower_is_computed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = open_bundle(export_of_tower(tmp_path)).manifest
    part = manifest.dense_part
    assert part is not None
    assert part.user_side is not None
    fewest = part.user_side.fewest_items
    assert fewest in fewest_items.SIZES
    show.show_scores(manifest, part)
    assert f"user side: used for requests of {fewest} items or more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("times", "fewest"),
    one_in(
        2,
        [
            pytest.param({256: 1.2, 16: 0.5}, None, id="never"),
            pytest.param({16: 1.5}, 32, id="not the fewest"),
            pytest.param({64: 1.3, 16: 0.9}, 128, id="none below a size that is slower"),
        ],
    ),
)
def test_the_user_side_is_used_above_the_last_size_where_it_is_slower(
    tmp_path: Path,
    times: dict[int, float],
    fewest: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fewest_items, "time_of_once", lambda *of: times.get(of[-1], 0.9))
    manifest = open_bundle(export_of_tower(tmp_path)).manifest
    part = manifest.dense_part
    assert part is not None
    assert part.user_side is not None
    assert part.user_side.fewest_items == fewest
    show.show_scores(manifest, part)
    said = "user side: never used: " if fewest is None else f"user side: used for requests of {fewest} items or more"
    assert said in capsys.readouterr().out


def test_times_are_relative_to_the_first_call() -> None:
    short, long = (partial(sum, range(count)) for count in (1_000, 100_000))
    assert relative_time(short, long) > 1
    assert relative_time(long, short) < 1
