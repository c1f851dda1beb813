"""What is asked of a plan."""

from pathlib import Path
from typing import Any

import pytest

from export import Sharding
from serving.errors import ConfigurationError
from tests.support.sharded_exports import sharded


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: Sharding(ranks=0), "ranks: expected 1 to 10000, got 0", id="no-ranks"),
        pytest.param(
            lambda: Sharding(ranks=6, ranks_per_host=4), "expected a divisor of 6 ranks, got 4", id="uneven-hosts"
        ),
        pytest.param(lambda: Sharding(types={"*": "rowwise"}), "expected one of auto, auto-simple", id="no-type"),
        pytest.param(lambda: Sharding(min_partition={"*": 6}), "a multiple of 4 columns, got 6", id="partition"),
        pytest.param(lambda: Sharding(plan=Path("p"), ranks=2), "plan: expected no ranks", id="plan-and-ranks"),
        pytest.param(
            lambda: Sharding(plan="p", ranks_per_host=1, row_wise_over=5),
            "plan: expected no ranks_per_host, row_wise_over beside it",
            id="plan-and-more",
        ),
        pytest.param(
            lambda: Sharding(types={"*": ["row_wise", "auto"]}), "expected one of .*, got 'auto'", id="several"
        ),
        pytest.param(lambda: Sharding(types={"*": []}), "expected one of .*, got ''", id="no-type"),
        pytest.param(
            lambda: Sharding(pooling_factors={"*": -1.0}), "expected >= 0 and below 1000000, got -1", id="pooling"
        ),
    ],
)
def test_contradictory_sharding_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_pooling_factors_of_unknown_features_are_refused(tmp_path: Path) -> None:
    expected = r"pooling_factors 'item': expected one for each of its 2 features \(item_id, recent_items\), got 3"
    with pytest.raises(ConfigurationError, match=expected):
        sharded(tmp_path, Sharding(ranks=2, pooling_factors={"item": [1.0, 2.0, 3.0]}))


def test_settings_of_no_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="types 'usr': expected the name of a table or a glob"):
        sharded(tmp_path, Sharding(ranks=2, types={"usr": "row_wise"}))
