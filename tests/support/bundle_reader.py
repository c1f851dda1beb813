"""A reader of bundles, written from docs/bundle.md alone, in numpy."""

import hashlib
import io
import json
from collections import abc
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bags = abc.Sequence[abc.Sequence[int]]
BITS = {"FP32": 32, "FP16": 16, "INT8": 8, "INT4": 4, "INT2": 2}
DTYPES = list(BITS)
POOLINGS = ["SUM", "MEAN"]
FLOATS = {"FP32": "<f4", "FP16": "<f2"}
DENSE = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32, "BOOL": np.bool_}
DENSE |= {"INT16": np.int16, "INT8": np.int8, "UINT8": np.uint8}


WORD = 2**64 - 1


def finished(h: int) -> int:
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & WORD
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & WORD
    return h ^ h >> 33


def murmur(x: int) -> int:
    def rotl(number: int, bits: int) -> int:
        return (number << bits | number >> 64 - bits) & WORD

    a = rotl(x * 0x87C37B91114253D5 & WORD, 31) * 0x4CF5AD432745937F & WORD
    a = rotl(a, 27) * 5 + 0x52DCE729 & WORD
    c = (a * 5 + 0x38495AB5 & WORD) ^ 16
    a = (a ^ 16) + c & WORD
    c = c + a & WORD
    a, c = finished(a), finished(c)
    a = a + c & WORD
    return a ^ (c + a & WORD)


def required(manifest: Any) -> list[str]:
    """What `requires` has to name, in order: the table of section 2."""
    tables, features = manifest["tables"], manifest["features"]
    maps = [table["id_map"] for table in tables if "id_map" in table]
    dense_files = (manifest.get("dense_part") or {}).get("files") or []
    has = {
        "aot_inductor": any(file["format"] == "AOTINDUCTOR" for file in dense_files),
        "compacted": manifest.get("compacted") is not None,
        "dense_files": bool(dense_files),
        "dense_part": manifest.get("dense_part") is not None,
        "hosts": bool(manifest.get("hosts")) or manifest.get("part_of") is not None,
        "id_maps": bool(maps),
        "input_hash_size": any("input_hash_size" in id_map.get("hashed", {}) for id_map in maps),
        "int32_ids": manifest.get("id_dtype") == "INT32",
        "modulo": any(table["id_policy"] == "modulo" for table in tables),
        "no_program": "program.pt" not in manifest["files"],
        "position_weights": any("position_weights" in feature for feature in features),
        "sequences": any(table["pooling"] == "NONE" for table in tables),
        "user_side": (manifest.get("dense_part") or {}).get("user_side") is not None,
    }
    return sorted(name for name, is_there in has.items() if is_there)


class Reader:
    """The pooled embeddings of a bundle. The numbers in brackets are sections of docs/bundle.md."""

    def __init__(self, bundle: Path) -> None:
        text = (bundle / "manifest.json").read_bytes()
        self.manifest = json.loads(text)
        assert self.manifest["format_version"] == 10  # [2]
        assert self.manifest["requires"] == required(self.manifest)  # [2]
        self.plan = self.manifest["plan"]
        self.tables = {table["name"]: table for table in self.manifest["tables"]}
        self.files = {}
        for name, digest in self.manifest["files"].items():  # [7]
            content = (bundle / name).read_bytes()
            assert len(content) == digest["size_bytes"]
            assert hashlib.sha256(content).hexdigest() == digest["sha256"]
            self.files[name] = content

    @property
    def keys(self) -> dict[str, list[Any]]:
        """The features of each key [2]."""
        features_by_key: dict[str, list[Any]] = {}
        for feature in self.manifest["features"]:
            features_by_key.setdefault(feature.get("shared_key", feature["name"]), []).append(feature)
        return features_by_key

    def digest(self, name: str) -> str:
        """`schema_digest` or `placement_digest` of the manifest [7]."""
        features, tables = self.manifest["features"], self.tables
        shared = [
            [feature.get("shared_key"), "sequence"]
            if tables[feature["table"]]["pooling"] == "NONE"
            else [feature["shared_key"]]
            if "shared_key" in feature
            else []
            for feature in features
        ]
        of_table = [
            [
                tables[feature["table"]]["dim"],
                tables[feature["table"]]["weighted"] and "position_weights" not in feature,
            ]
            for feature in features
        ]
        schema = [
            [[feature["name"], *of, *key] for feature, of, key in zip(features, of_table, shared, strict=True)],
            self.manifest["output_dtype"],
            *(["INT32"] if self.manifest.get("id_dtype") == "INT32" else []),
            *([self.names_of_scores] if self.manifest.get("dense_part") else []),
        ]
        placement = [self.manifest[key] for key in ("features", "tables", "plan", "output_dtype")]
        said = {"schema_digest": schema, "placement_digest": placement}[name]
        return hashlib.sha256(written(said).encode()).hexdigest()

    @property
    def names_of_scores(self) -> list[Any]:
        """What a client sees of the dense part [7]."""
        part = self.manifest["dense_part"]
        inputs = [
            [dense_input["name"], *dense_input["shape"]]
            if len(dense_input["shape"]) == 1
            and dense_input.get("dtype", "FP32") == "FP32"
            and "key" not in dense_input
            else [
                dense_input["name"],
                dense_input["shape"],
                dense_input.get("dtype", "FP32"),
                *([dense_input["key"]] if "key" in dense_input else []),
            ]
            for dense_input in part["inputs"]
        ]
        outputs = [
            [
                output["name"],
                output["shape"],
                *([output["key"]] if "key" in output else []),
                *([[output["dtype"]]] if output.get("dtype", "FP32") != "FP32" else []),
            ]
            for output in part["outputs"]
        ]
        fixed = sorted([key, length] for key, length in part.get("fixed_lengths", {}).items())
        together = part.get("together", [])
        rules = [fixed, together] if together else [fixed] if fixed else []
        return [inputs, outputs, *rules]

    def score(self, request: Mapping[str, Bags], dense: Mapping[str, Any]) -> dict[str, Any]:
        """{output: [B, …], or [n, …]} for {key: bags} of all keys, and {dense input: [B, *shape], or [n, *shape]} [6]."""
        part = self.manifest["dense_part"]
        answer = self.lookup({key: request[key] for key in self.keys})
        samples = len(next(iter(request.values())))
        pooled = [
            answer[feature["name"]]
            for feature in self.manifest["features"]
            if self.tables[feature["table"]]["pooling"] != "NONE"
        ]
        every = np.concatenate([np.empty((samples, 0), FLOATS[self.manifest["output_dtype"]]), *pooled], axis=1)
        tensors: dict[str, npt.NDArray[Any]] = {
            dense_input["name"]: np.asarray(dense[dense_input["name"]], DENSE[dense_input.get("dtype", "FP32")])
            for dense_input in part["inputs"]
        }
        ids = {key: sum(map(len, bags)) for key, bags in request.items()}
        rows = [ids[dense_input["key"]] if "key" in dense_input else samples for dense_input in part["inputs"]]
        shapes = [[count, *dense_input["shape"]] for count, dense_input in zip(rows, part["inputs"], strict=True)]
        assert [[*array.shape] for array in tensors.values()] == shapes
        inputs = [tensors[dense_input["name"]] for dense_input in part["inputs"] if "key" not in dense_input]
        import torch  # `make quick` reads tables without it

        files = part.get("files") or [{"name": "scores.pt", "format": "TORCHSCRIPT"}]
        file = next(file for file in files if file["format"] != "AOTINDUCTOR")
        content = io.BytesIO(self.files[file["name"]])
        if file["format"] == "TORCHSCRIPT":
            forward = torch.jit.load(content).forward  # type: ignore[no-untyped-call]
        else:
            forward = torch.export.load(content).module()
        jagged = []
        for spec in part.get("jagged", []):
            if spec["kind"] == "ROWS":
                jagged.append(np.ascontiguousarray(answer[spec["name"]]))
                continue
            if spec["kind"] == "NUMBERS":
                jagged.append(tensors[spec["name"]])
                continue
            bags = request[spec["name"]]
            lengths, values = [len(bag) for bag in bags], [id_ for bag in bags for id_ in bag]
            jagged.append(np.array(lengths, np.int32) if spec["kind"] == "LENGTHS" else np.array(values, np.int64))
        scores = forward(*map(torch.from_numpy, (every, *inputs, *jagged)))
        for spec, numbers in zip(part["outputs"], scores, strict=True):
            assert list(numbers.shape) == [ids[spec["key"]] if "key" in spec else samples, *spec["shape"]]
        return {output["name"]: numbers.numpy() for output, numbers in zip(part["outputs"], scores, strict=True)}

    def lookup(self, request: Mapping[str, Bags], weights: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """{feature: [B, dim], of a sequence [n, dim]} for {key: bags} [5]."""
        bags_of = {
            feature["name"]: [[id_] for bag in request[key] for id_ in bag]
            for key in request
            for feature in self.keys[key]
            if self.tables[feature["table"]]["pooling"] == "NONE"
        }
        return {
            feature["name"]: np.stack(
                [
                    self.pool(
                        self.tables[feature["table"]],
                        bag,
                        self.weights_of(feature, bag, weights[key][sample] if weights else None),
                    )
                    for sample, bag in enumerate(bags)
                ]
            )
            for key, bags in request.items()
            for feature in self.keys[key]
            if feature["name"] not in bags_of
        } | {
            name: np.stack([self.pool(self.table_of(name), bag, None) for bag in bags])
            for name, bags in bags_of.items()
        }

    def table_of(self, name: str) -> Any:
        """The table of a feature."""
        return next(self.tables[feature["table"]] for feature in self.manifest["features"] if feature["name"] == name)

    def weights_of(self, feature: Any, bag: Bags | Any, sent: Any) -> Any:
        """The weights of a bag for one feature, where a request sends some or none [5]."""
        by_position = feature.get("position_weights")
        if by_position is None:
            return sent
        assert not by_position or len(bag) <= len(by_position)
        return by_position[: len(bag)] if by_position else [1.0] * len(bag)

    def pool(self, table: Any, bag: abc.Sequence[int], weights: abc.Sequence[float] | None) -> npt.NDArray[Any]:
        """One bag [5]."""
        if "id_map" in table:
            bag = [self.row_of(table, id_) for id_ in bag]
        policy = table["id_policy"]
        if policy == "modulo":
            bag = [id_ % table["rows"] for id_ in bag]
        counted = [1.0] * len(bag) if weights is None or not table["weighted"] else weights
        ids = [(id_, weight) for id_, weight in zip(bag, counted, strict=True) if 0 <= id_ < table["rows"]]
        if isinstance(policy, dict):
            inside = [id_ if 0 <= id_ < table["rows"] else policy["default_row"] for id_ in bag]
            ids = list(zip(inside, counted, strict=True))
        assert policy != "error" or len(ids) == len(bag)
        answer = np.zeros(table["dim"], np.float32)
        for id_, weight in ids:
            answer += self.row(table, id_) * np.float32(weight)
        if table["pooling"] == "MEAN" and ids:
            answer /= np.float32(len(ids))
        return answer.astype(FLOATS[self.manifest["output_dtype"]])

    def row_of(self, table: Any, id_: int) -> int:
        """The row that a raw id reads [5, maps of ids]."""
        map_, content = table["id_map"], self.files["ids.bin"]
        h = (id_ & WORD) * 0xFF51AFD7ED558CCD & WORD
        h = (h ^ h >> 32) * 0xC4CEB9FE1A85EC53 & WORD
        seed = content[map_["seeds_offset"] + ((h >> 32) * map_["buckets"] >> 32)]
        m = (h ^ seed * 0x9E3779B97F4A7C15 & WORD) * 0xD6E8FEB86659FD93 & WORD
        start = map_["entries_offset"] + 16 * ((m >> 32) * map_["capacity"] >> 32)
        key, row = (
            int.from_bytes(content[offset : offset + 8], "little", signed=True) for offset in (start, start + 8)
        )
        if key == id_ and row >= 0:
            return row
        if "hashed" not in map_:
            return int(table["rows"]) - 1
        bounds = map_["hashed"]["bounds"]
        buckets = len(bounds) - 1
        b, quotient = id_ % buckets, id_ // buckets
        if "input_hash_size" in map_["hashed"]:
            block = -(-map_["hashed"]["input_hash_size"] // buckets)
            b, quotient = id_ // block, id_ % block
            assert 0 <= b < buckets
        x = quotient if map_["hashed"].get("divided", False) else id_
        return int(bounds[b] + murmur(x & WORD) % (bounds[b + 1] - bounds[b]))

    def row(self, table: Any, id_: int) -> npt.NDArray[np.float32]:
        """One row of a table, put together from its blocks of columns [4]; of copies, the last one answers."""
        row = np.full(table["dim"], np.nan, np.float32)
        for shard in self.plan["shards"]:
            (top, bottom), (first, right) = shard["rows"], shard["columns"]
            if shard["table"] == table["name"] and top <= id_ < bottom:
                row[first:right] = self.stored(table["dtype"], shard, id_ - top, right - first)
        return row

    def stored(self, dtype: str, shard: Any, number: int, width: int) -> npt.NDArray[np.float32]:
        """Row `number` of a shard [3]."""
        size = row_bytes(dtype, width)
        start = shard["offset_bytes"] + number * size
        content = self.files[self.plan["ranks"][shard["rank"]]["weights"]]
        numbers: npt.NDArray[np.float32] = unpacked(content[start : start + size], 1, width, dtype)[0]
        return numbers


def written(value: Any) -> str:
    """A value as JSON, for digests [7]."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{written(key)}:{written(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, float) or "e" not in text:
        return text
    digits, exponent = text.split("e")
    return f"{Decimal(text):f}" if exponent == "-05" else f"{digits}e{int(exponent)}"


def exported_table(bundle: Path, name: str) -> npt.NDArray[np.float32]:
    """The numbers a bundle holds for a table, unpacked bit by bit from the raw bytes of its shards.

    Every number must be stored exactly once, or, data-parallel, once by each rank and the same.
    """
    manifest = json.loads((bundle / "manifest.json").read_text())
    table = next(table for table in manifest["tables"] if table["name"] == name)
    plan = manifest["plan"]
    numbers = np.full((table["rows"], table["dim"]), np.nan, np.float32)
    copies = np.zeros(numbers.shape, int)
    for shard in plan["shards"]:
        if shard["table"] == name:
            raw = (bundle / plan["ranks"][shard["rank"]]["weights"]).read_bytes()
            (top, bottom), (first, right) = shard["rows"], shard["columns"]
            block = unpacked(raw[shard["offset_bytes"] :], bottom - top, right - first, table["dtype"])
            region = (slice(top, bottom), slice(first, right))
            assert (np.isnan(numbers[region]) | (numbers[region] == block)).all()
            numbers[region] = block
            copies[region] += 1
    assert (copies == (len(plan["ranks"]) if plan["sharding"][name] == "data_parallel" else 1)).all()
    return numbers


def row_bytes(dtype: str, columns: int) -> int:
    """The size of a stored row [3]."""
    return (4 if dtype.startswith("INT") else 0) + columns * BITS[dtype] // 8


def unpacked(raw: bytes, rows: int, columns: int, dtype: str) -> npt.NDArray[np.float32]:
    """The numbers of stored rows [3], float32 [rows, columns]."""
    bits = BITS[dtype]
    size = row_bytes(dtype, columns)
    stored = np.frombuffer(raw, np.uint8, rows * size).reshape(rows, size)
    if bits >= 16:
        return np.frombuffer(stored.tobytes(), f"<f{bits // 8}").reshape(rows, columns).astype(np.float32)
    scale, bias = np.frombuffer(stored[:, :4].tobytes(), "<f2").reshape(rows, 2).T.astype(np.float32)
    unpacked = np.unpackbits(stored[:, 4:], axis=1, bitorder="little").reshape(rows, columns, bits)
    codes = (unpacked * (1 << np.arange(bits))).sum(axis=2).astype(np.float32)
    numbers: npt.NDArray[np.float32] = codes * scale[:, None] + bias[:, None]
    return numbers
