"""docs/bundle.md is enough to answer a router's request from its bundle and its hosts': here is a reader that does.

`Router` is written from section 10 of that page, over the `Reader` of test_bundle_spec.py. It shares no code with
`serving` or `export`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch import nn

from export import ExportConfig, IdPolicy, OutputDtype, Sharding, WeightDtype
from serving.bundle import DefaultRow
from serving.engine import Engine
from serving.requests.answers import JaggedRows
from tests.docs.test_bundle_spec import WithSequences, collection, positioned, some_request
from tests.support.bundle_reader import DTYPES, FLOATS, Bags, Reader
from tests.support.hosts import export_hosts, in_one_process

OWN = 0
# Ids of a bag with their weights.
Bag = list[tuple[int, float]]


class Router(Reader):
    """The pooled embeddings of a router and its hosts, whose bundles are read from disk."""

    def __init__(self, bundle: Path, repositories: Mapping[int, Path]) -> None:
        super().__init__(bundle)
        ranks = self.plan["ranks"]
        assert "part_of" not in self.manifest
        assert [rank["weights"] is None for rank in ranks] == [False] + [True] * (len(ranks) - 1)
        named = {host["host"]: host for host in self.manifest["hosts"]}
        assert list(named) == sorted(rank["host"] for rank in ranks[1:])
        self.hosts: dict[int, Reader] = {}
        for rank, host in enumerate(rank["host"] for rank in ranks):
            if rank != OWN:
                path = repositories[host] / named[host]["model"] / str(named[host]["version"])
                assert hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest() == named[host]["manifest"]
                self.hosts[rank] = Reader(path)
                self.check(rank, bundle.parent.name)

    def segments(self) -> Iterator[tuple[Any, Any, str]]:
        """Each feature over each shard of its table, with the segment's name."""
        for feature in self.manifest["features"]:
            shards = [shard for shard in self.plan["shards"] if shard["table"] == feature["table"]]
            for number, shard in enumerate(shards):
                yield feature, shard, feature["name"] if len(shards) == 1 else f"{feature['name']}#{number}"

    def name_of(self, shard: Any) -> str:
        """What a host's bundle calls a shard."""
        table, (r0, r1), (c0, c1) = self.tables[shard["table"]], shard["rows"], shard["columns"]
        is_cut = r1 - r0 < table["rows"], c1 - c0 < table["dim"]
        rows = f"[{r0}:{r1}]" if is_cut[0] else "[:]"
        columns = f"[{c0}:{c1}]"
        return str(table["name"]) + (rows + columns if is_cut[1] else rows if is_cut[0] else "")

    def check(self, rank: int, model: str) -> None:
        """A host's manifest is what the page says."""
        manifest = self.hosts[rank].manifest
        host = self.plan["ranks"][rank]["host"]
        segments_of_rank = [segment for segment in self.segments() if segment[1]["rank"] == rank]
        shards = {self.name_of(shard): shard for _, shard, _ in segments_of_rank}
        assert "hosts" in manifest["requires"]
        assert "hosts" not in manifest
        assert manifest["part_of"] == {"model": model, "host": host, "plan": self.digest("placement_digest")}
        assert manifest["features"] == [
            {"name": name, "table": self.name_of(shard)} for _, shard, name in segments_of_rank
        ]
        assert manifest["plan"]["ranks"] == [{"host": host, "device": "cpu", "weights": "weights.0.bin"}]
        assert manifest["plan"]["sharding"] == dict.fromkeys(shards, "table_wise")
        assert {table["name"]: table for table in manifest["tables"]} == {
            name: {
                **self.tables[shard["table"]],
                "name": name,
                "rows": shard["rows"][1] - shard["rows"][0],
                "dim": shard["columns"][1] - shard["columns"][0],
                "pooling": "SUM",
                "id_policy": "error",
            }
            for name, shard in shards.items()
        }
        assert {shard["table"]: shard["offset_bytes"] for shard in manifest["plan"]["shards"]} == {
            name: shard["offset_bytes"] for name, shard in shards.items()
        }
        assert manifest["id_dtype"] == "INT32"

    def lookup(self, request: Mapping[str, Bags], weights: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """{feature: [B, dim], of a sequence [n, dim]} for {key: bags}, as section 10 says a router answers."""
        bags = {
            feature["name"]: [
                self.inside(
                    self.tables[feature["table"]],
                    bag,
                    self.weights_of(feature, bag, weights[key][sample] if weights else [1.0] * len(bag)),
                )
                for sample, bag in enumerate(value)
            ]
            for key, value in request.items()
            for feature in self.keys[key]
            if self.tables[feature["table"]]["pooling"] != "NONE"
        } | {
            feature["name"]: [
                self.inside(self.tables[feature["table"]], [id_], [1.0]) for bag in value for id_ in bag
            ]
            for key, value in request.items()
            for feature in self.keys[key]
            if self.tables[feature["table"]]["pooling"] == "NONE"
        }
        sums = {name: np.zeros((len(bag), self.dim_of(name)), np.float32) for name, bag in bags.items()}
        for rank in range(len(self.plan["ranks"])):
            bags_of_rank = {
                name: (feature["name"], shard, [cut(bag, *shard["rows"]) for bag in bags[feature["name"]]])
                for feature, shard, name in self.segments()
                if shard["rank"] == rank and feature["name"] in bags
            }
            answers = self.look_up_own(bags_of_rank) if rank == OWN else self.ask(rank, bags_of_rank)
            for name, (feature, shard, _) in bags_of_rank.items():
                sums[feature][:, slice(*shard["columns"])] += answers[name]
        for feature in self.manifest["features"]:
            if feature["name"] in bags and self.tables[feature["table"]]["pooling"] == "MEAN":
                counts = np.array([max(1, len(bag)) for bag in bags[feature["name"]]], np.float32)
                sums[feature["name"]] /= counts[:, None]
        return {name: values.astype(FLOATS[self.manifest["output_dtype"]]) for name, values in sums.items()}

    def dim_of(self, feature: str) -> int:
        (table,) = (entry["table"] for entry in self.manifest["features"] if entry["name"] == feature)
        dim: int = self.tables[table]["dim"]
        return dim

    def inside(self, table: Any, bag: Any, weights: Any) -> Bag:
        """A bag after the id policy [5]."""
        policy, weights = table["id_policy"], weights if table["weighted"] else [1.0] * len(bag)
        if policy == "modulo":
            bag = [id_ % table["rows"] for id_ in bag]
        pairs = list(zip(bag, weights, strict=True))
        valid = [pair for pair in pairs if 0 <= pair[0] < table["rows"]]
        assert policy != "error" or valid == pairs
        if not isinstance(policy, dict):
            return valid
        return [(id_ if 0 <= id_ < table["rows"] else policy["default_row"], weight) for id_, weight in pairs]

    def look_up_own(self, bags_by_name: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
        """The sums of the router's own rank."""
        return {
            name: np.stack(
                [
                    sum(
                        (
                            self.stored(self.tables[shard["table"]]["dtype"], shard, row, width(shard))
                            * np.float32(weight)
                            for row, weight in bag
                        ),
                        start=np.zeros(width(shard), np.float32),
                    )
                    for bag in bags
                ]
            )
            for name, (_, shard, bags) in bags_by_name.items()
        }

    def ask(self, rank: int, bags_by_name: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """The sums of a host: its bundle is an ordinary one."""
        request = {name: [[row for row, _ in bag] for bag in bags] for name, (_, _, bags) in bags_by_name.items()}
        weights = {
            name: [[weight for _, weight in bag] for bag in bags] for name, (_, _, bags) in bags_by_name.items()
        }
        weighted = any(table["weighted"] for table in self.hosts[rank].tables.values())
        return self.hosts[rank].lookup(request, weights if weighted else None)


def width(shard: Any) -> int:
    columns: int = shard["columns"][1] - shard["columns"][0]
    return columns


def cut(bag: Bag, r0: int, r1: int) -> Bag:
    """The rows of a shard that a bag asks for."""
    return [(id_ - r0, weight) for id_, weight in bag if r0 <= id_ < r1]


# All ways to cut, in one plan.
TYPES = {
    "*": "row_wise",
    "INT8_*": "column_wise",
    "INT2_SUM": "grid_shard",
    "INT4_SUM": "table_wise",
    "FP16_MEAN": "data_parallel",
    "FP32_SUM": "table_row_wise",
}


@pytest.mark.parametrize(
    ("output_dtype", "sums_dtype", "weighted"),
    [
        pytest.param("FP32", "FP32", False, id="FP32"),
        pytest.param("FP32", "FP32", True, id="weighted"),
        pytest.param("FP16", "FP16", False, id="FP16"),
        pytest.param("FP32", "FP32", None, id="position weights"),
        pytest.param("FP32", "FP32", "sequences", id="sequences"),
    ],
)
def test_a_router_is_answered_for_by_the_page_alone(
    output_dtype: str, sums_dtype: str, weighted: bool | str | None, tmp_path: Path
) -> None:
    if weighted == "sequences":
        module: nn.Module = WithSequences()
        weighted = False
    else:
        module = positioned() if weighted is None else collection(weighted=bool(weighted))
    has_weights = weighted is not False
    config = ExportConfig(
        dtype={f"{dtype}_*": WeightDtype[dtype] for dtype in DTYPES},
        id_policy={"INT4_*": IdPolicy.ZERO, "INT2_*": IdPolicy.MODULO, "FP32_*": DefaultRow(default_row=7)},
        output_dtype=OutputDtype(output_dtype),
        sums_dtype=OutputDtype(sums_dtype),
        sharding=Sharding(
            ranks=4,
            ranks_per_host=2,
            types={name: kind for name, kind in TYPES.items() if not has_weights or name != "FP16_MEAN"},
        ),
    )
    bundle = export_hosts(tmp_path, module, config)
    one = Engine.open(in_one_process(tmp_path, module, config, bundle))
    # Each host has its own bundle, and no other.
    repositories = {}
    for host in json.loads((bundle / "manifest.json").read_text())["hosts"]:
        repositories[host["host"]] = tmp_path / str(host["host"])
        repositories[host["host"]].mkdir()
        (bundle.parent.parent / host["model"]).rename(repositories[host["host"]] / host["model"])
    router = Router(bundle, repositories)
    assert {shard["rank"] for shard in router.plan["shards"]} == {0, 1, 2} - ({0} if has_weights else set())

    request, weights, jagged = some_request(router)
    answered = router.lookup(request, weights if weighted else None)
    expected = one.lookup(jagged if weighted else request)
    assert answered.keys() == expected.keys()
    rounding = 1e-6 if output_dtype == "FP32" else 5e-3
    for name, embeddings in expected.items():
        answer = embeddings.values if isinstance(embeddings, JaggedRows) else embeddings
        assert answer.dtype == answered[name].dtype
        np.testing.assert_allclose(answered[name], answer, rtol=rounding, atol=rounding, err_msg=name)

    for reader, model in [
        (router, bundle.parent),
        *((reader, repositories[rank - 1]) for rank, reader in router.hosts.items()),
    ]:
        (config_file,) = [model / "config.pbtxt"] if reader is router else model.glob("*/config.pbtxt")
        said = re.search(r'"schema_digest"\s+value \{\s+string_value: "(\w+)"', config_file.read_text())
        assert said is not None
        assert said[1] == reader.digest("schema_digest")
