"""Tables, requests and right answers as every candidate needs them: ours a bundle, peers plain rows in files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from examples.hosts.dlrm import IDS_PER_SAMPLE, ROWS
from examples.movielens import data
from examples.movielens.model import DIMS, FEATURES, TABLES
from export import ExportConfig, Sharding, WeightDtype, export_model
from export.trained.checkpoint import Checkpoint
from export.trained.generated_checkpoint import GeneratedTable, generated_checkpoint
from export.trained.tables import collect_tables
from serving.client import ModelInfo
from serving.client.messages import infer_request
from serving.requests.types import Tensors
from serving.tables.pages import MappedFile

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

MODEL = "ours"
# In padded ids: no id.
PAD = -1
_BLOCK = 1 << 16
# Requests by their number of samples.
SIZES = {1: 256, 128: 32}


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """Tables, and what is asked of them.

    Attributes:
        rows, dims: of each table.
        features: the table each reads, and the most ids it has a sample.
        requests: by their number of samples, int64 [requests, samples, ids], padded with −1 at the end of a bag.
        sequences: numbers of the features that are not pooled: each of their ids is answered by a row.
    """

    name: str
    rows: Sequence[int]
    dims: Sequence[int]
    features: Sequence[tuple[int, int]]
    requests: Mapping[int, Ids]
    sequences: Sequence[int] = ()

    @property
    def width(self) -> int:
        """Columns of an answer."""
        return sum(self.dims[table] for table, _ in self.features)

    @property
    def float_bytes(self) -> int:
        """Of all tables in FP32."""
        return sum(4 * rows * dim for rows, dim in zip(self.rows, self.dims, strict=True))

    def module(self) -> EmbeddingBagCollection:
        """Without weights."""
        return EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=f"t{number}",
                    num_embeddings=rows,
                    embedding_dim=dim,
                    feature_names=[f"f{n}" for n, (table, _) in enumerate(self.features) if table == number],
                    pooling=PoolingType.SUM,
                )
                for number, (rows, dim) in enumerate(zip(self.rows, self.dims, strict=True))
            ],
        )

    def pooled(self) -> EmbeddingBagCollection:
        """`module` on the CPU, with float rows."""
        collection = EmbeddingBagCollection(self.module().embedding_bag_configs(), device=torch.device("cpu"))
        self.copy_rows(collection.embedding_bags.items())
        return collection

    def copy_rows(self, tables: Iterable[tuple[str, Any]]) -> None:
        """Give tables their float rows, which no training changes.

        Args:
            tables: the nn.Embedding or nn.EmbeddingBag of each, by name.
        """
        with torch.no_grad():
            for name, table in tables:
                number = int(name[1:])
                table.weight.copy_(self.stored(number).read(0, self.rows[number]))
                table.weight.requires_grad = False

    def checkpoint(self) -> Checkpoint:
        """Normal rows, the same every time."""
        return generated_checkpoint(collect_tables(self.module()).tables)

    def export(
        self, repository: Path, dtype: WeightDtype = WeightDtype.INT8, sharding: Sharding | None = None
    ) -> Path:
        """Our bundle: of one rank, or as `sharding` says."""
        config = ExportConfig(dtype={"*": dtype}, sharding=sharding or Sharding())
        return export_model(self.module(), repository, MODEL, config, checkpoint=self.checkpoint())

    def tensors(self, samples: int) -> list[Tensors]:
        """The requests as we take them."""
        return [self._tensors(padded) for padded in self.requests[samples]]

    def _tensors(self, padded: Ids) -> Tensors:
        """Our features lie table by table."""
        bags = np.split(padded, np.cumsum([ids for _, ids in self.features])[:-1], axis=1)
        ordered = [bags[n] for n in self.order]
        values = np.concatenate([bag[bag != PAD] for bag in ordered])
        lengths = np.concatenate([(bag != PAD).sum(axis=1) for bag in ordered]).astype(np.int32)
        return Tensors(None, values, lengths)

    @property
    def order(self) -> list[int]:
        """The features in the order of our answers: TorchRec's, table by table."""
        return sorted(range(len(self.features)), key=lambda n: self.features[n][0])

    def write(self, folder: Path, kinds: Sequence[str]) -> None:
        """What peers and the load generator read: tables.json, requests, and rows of `kinds` (fp32, int8)."""
        self.write_tables(folder, kinds)
        for samples in self.requests:
            self._write_requests(folder, samples)

    def write_tables(self, folder: Path, kinds: Sequence[str]) -> None:
        """The same without requests."""
        assert self.order == list(range(len(self.features))), "features of one table must be side by side"
        folder.mkdir(parents=True)
        tables = [{"rows": rows + 1, "dim": dim} for rows, dim in zip(self.rows, self.dims, strict=True)]
        features = [
            {"table": table, "ids": ids, "pooled": number not in self.sequences}
            for number, (table, ids) in enumerate(self.features)
        ]
        (folder / "tables.json").write_text(json.dumps({"tables": tables, "features": features}))
        for kind in kinds:
            for number in range(len(self.rows)):
                self._write_rows(folder / f"{number}.{kind}", number, kind)

    def stored(self, number: int) -> GeneratedTable:
        """The float rows of a table."""
        (table,) = (table for table in collect_tables(self.module()).tables if table.name == f"t{number}")
        rows = self.checkpoint()._stored_at(table.name, table.key)
        assert isinstance(rows, GeneratedTable)
        return rows

    def _write_rows(self, path: Path, number: int, kind: str) -> None:
        """The rows, and one of zeros for padding."""
        stored = self.stored(number)
        with path.open("wb") as file:
            for start in range(0, self.rows[number], _BLOCK):
                rows = stored.read(start, min(start + _BLOCK, self.rows[number]))
                file.write(_packed(rows, kind))
            file.write(_packed(torch.zeros(1, self.dims[number]), kind))
        for _ in MappedFile(path, path.stat().st_size, huge=True).chunks():
            pass  # into huge pages, where ours are

    def padded(self, samples: int) -> Ids:
        """The requests as peers take them: padded with the number of the row of zeros."""
        padding = np.repeat([self.rows[table] for table, _ in self.features], [ids for _, ids in self.features])
        ids: Ids = np.where(self.requests[samples] == PAD, padding, self.requests[samples])
        return ids

    def _write_requests(self, folder: Path, samples: int) -> None:
        dims = {f"f{n}": self.dims[table] for n, (table, _) in enumerate(self.features)}
        keys: dict[str, tuple[str, ...]] = {name: (name,) for name in dims}
        info = ModelInfo(dims, keys, (), np.dtype(np.float32), "", np.dtype(np.int64), frozenset(), {})
        ours = [infer_request(MODEL, tensor, info).SerializeToString() for tensor in self.tensors(samples)]
        save_requests(folder, samples, {"ids": self.padded(samples)}, ours, self.answer(self.requests[samples][0]))

    def answer(self, padded: Ids) -> Floats:
        """What the float rows say, in float64 and rounded once: [B, D]."""
        parts, start = [], 0
        for table, ids in self.features:
            bags = padded[:, start : start + ids]
            start += ids
            rows = self.stored(table).rows(torch.from_numpy(np.maximum(bags, 0).ravel())).double().numpy()
            parts.append((rows.reshape(*bags.shape, -1) * (bags != PAD)[:, :, np.newaxis]).sum(axis=1))
        answer: Floats = np.concatenate(parts, axis=1).astype(np.float32)
        return answer


def save_requests(
    folder: Path, samples: int, arrays: Mapping[str, Any], ours: Sequence[bytes], answer: Floats
) -> None:
    """What the load generator reads of requests with so many samples.

    Args:
        arrays: as peers take them, [requests, samples, width] by name.
        ours: the same as our clients send them.
        answer: the right one to the first.
    """
    np.savez(
        folder / f"requests_{samples}.npz",
        ours=np.frombuffer(b"".join(ours), np.uint8),
        ends=np.cumsum([0, *map(len, ours)]),
        answer=answer,
        **arrays,
    )


def _packed(rows: torch.Tensor, kind: str) -> bytes:
    packed = rows if kind == "fp32" else torch.ops.quantized.embedding_bag_byte_prepack(rows.contiguous())
    return packed.numpy().tobytes()


def _uniform(rows: Sequence[int], features: Sequence[tuple[int, int]], sizes: Mapping[int, int]) -> dict[int, Ids]:
    random = np.random.default_rng(0)
    tops = np.repeat([rows[table] for table, _ in features], [ids for _, ids in features])
    return {samples: random.integers(0, tops, (count, samples, tops.size)) for samples, count in sizes.items()}


def dlrm(cap: int, name: str, sizes: Mapping[int, int] = SIZES, dim: int = 128) -> PeerWorkload:
    """MLPerf's DLRM-v2: 26 tables, 214 ids a sample, rows capped; uniform ids.

    Args:
        sizes: how many requests there are, by their number of samples.
    """
    rows = [min(rows, cap) for rows in ROWS]
    features = list(enumerate(IDS_PER_SAMPLE))
    return PeerWorkload(name, rows, [dim] * len(rows), features, _uniform(rows, features, sizes))


def wide() -> PeerWorkload:
    """A wide model: 100 one-hot features of dim 16."""
    rows = [20_000] * 100
    features = [(table, 1) for table in range(100)]
    return PeerWorkload("wide", rows, [16] * 100, features, _uniform(rows, features, SIZES))


def movielens() -> PeerWorkload:
    """The tables of examples/movielens, summed, and its test ratings in their order: one, and 128 to rank at once."""
    samples = data.read_samples()
    sizes = data.catalogue().rows
    rows = [sizes[features[0]] for _, _, features in TABLES.values()]
    dims = [dim for dim, _, _ in TABLES.values()]
    tables = [number for number, (_, _, features) in enumerate(TABLES.values()) for _ in features]
    assert [dims[table] for table in tables] == [DIMS[name] for name in FEATURES]
    columns = []
    for name in FEATURES:
        values, lengths = samples.features[name].take(samples.test[: 32 * 128])
        column = np.full((len(lengths), int(lengths.max())), PAD, np.int64)
        column[np.arange(column.shape[1]) < lengths[:, np.newaxis]] = values
        columns.append(column)
    padded = np.concatenate(columns, axis=1)
    features = [(table, column.shape[1]) for table, column in zip(tables, columns, strict=True)]
    requests = {1: padded[:256, np.newaxis], 128: padded[: 32 * 128].reshape(32, 128, -1)}
    return PeerWorkload("movielens", rows, dims, features, requests)
