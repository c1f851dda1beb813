"""docs/bundle.md defines the manifest as the code does, and its examples are right."""

import enum
import json
import re
import types
import typing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from serving.bundle.id_maps import hashes_of
from serving.bundle.load import open_bundle, verify_digests
from serving.bundle.manifest import Manifest
from serving.bundle.parse import parse_manifest
from serving.engine import Engine
from tests.support.bundle_reader import WORD, murmur

PAGE = (Path(__file__).parents[2] / "docs" / "bundle.md").read_text()
DEFINITIONS = {
    name: re.findall(r"^  (\w+)(\?)?: (.+?)(?: = (.+?))?(?: +//.*)?$", body, re.MULTILINE)
    for name, body in re.findall(r"^([A-Z]\w+) \{\n(.*?)^\}", PAGE, re.MULTILINE | re.DOTALL)
}
# Keys that the page has, and that the parser takes out of a manifest before it converts the rest.
HEADER = {"format_version", "requires"}
# Keys that may be absent, but not null. msgspec reads both as None, and the parser tells them apart.
NOT_NULL = {"shared_key", "position_weights", "id_map", "hashed", "input_hash_size"}
(SHARDING_TYPES,) = re.findall(r"^ShardingType = (.+?)\n\n", PAGE, re.MULTILINE | re.DOTALL)


def types_in(annotation: object) -> dict[str, type[msgspec.Struct]]:
    """The JSON objects in a type, at any depth, by name."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        inner: list[object] = [field.type for field in msgspec.structs.fields(annotation)]
        by_name = {annotation.__name__: annotation}
    else:
        inner, by_name = [*typing.get_args(annotation)], {}
    return by_name | {name: struct for part in inner for name, struct in types_in(part).items()}


TYPES = types_in(Manifest)


def names_of_enums(annotation: object) -> set[str]:
    """The values of the enums in a type, as JSON."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {f'"{member.value}"' for member in annotation}
    return {name for argument in typing.get_args(annotation) for name in names_of_enums(argument)}


def test_the_page_defines_every_type_of_a_manifest() -> None:
    assert DEFINITIONS.keys() == TYPES.keys()


@pytest.mark.parametrize("name", TYPES)
def test_the_keys_of_a_type_are_those_of_the_code(name: str) -> None:
    lines = {key: line for key, *line in DEFINITIONS[name] if key not in HEADER}
    fields = {field.encode_name: field for field in msgspec.structs.fields(TYPES[name])}
    assert list(lines) == list(fields)
    for key, field in fields.items():
        optional, type_, default = lines[key]
        takes_null = types.NoneType in typing.get_args(field.type) and key not in NOT_NULL
        assert (bool(optional), "| null" in type_) == (not field.required, takes_null), key
        if default or not (field.required or takes_null or key in NOT_NULL):
            value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            assert json.loads(default) == json.loads(msgspec.json.encode(value)), key
        assert set(re.findall(r'"[^"]+"', type_.replace("ShardingType", SHARDING_TYPES))) == names_of_enums(
            field.type
        ), key


def test_the_example_bundle_answers_as_the_page_says(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| \d \| `((?:[0-9a-f]{2} ){5}[0-9a-f]{2})` \|", PAGE, re.MULTILINE)
    (model,) = re.findall(r"^`model.py` is the line `(.+?)`", PAGE, re.MULTILINE)
    bundle = tmp_path / "movies" / "1"
    bundle.mkdir(parents=True)
    (bundle / "manifest.json").write_text(text)
    (bundle / "model.py").write_text(f"{model}\n")
    (bundle / "weights.0.bin").write_bytes(bytes.fromhex("".join(rows)))

    ((bag, answer),) = re.findall(r"^The bag (\[.+?\]) of `words` is answered with ([\d., ]+):", PAGE, re.MULTILINE)
    verify_digests(open_bundle(bundle))
    engine = Engine.open(bundle)
    (expected,) = engine.lookup({"words": [json.loads(bag)]})["words"].tolist()
    assert expected == json.loads(f"[{answer}]")
    for row, numbers in enumerate(
        re.findall(r"^\| \d \| `(?:[0-9a-f]{2} ){5}[0-9a-f]{2}` \|.*\| (.+?) \|$", PAGE, re.MULTILINE)
    ):
        (stored,) = engine.lookup({"words": [[row]]})["words"].tolist()
        assert stored == json.loads(f"[{numbers}]".replace("−", "-"))

    manifest = parse_manifest(bundle / "manifest.json", text.encode())
    assert PAGE.count(f"`{manifest.schema_digest}`") == PAGE.count(f"`{manifest.placement_digest}`") == 1


def test_the_hashes_of_ids_are_those_of_the_code() -> None:
    lines = re.findall(r"^\| (−?\d+) \| `([0-9a-f]{16})` \| `([0-9a-f]{16})` \|$", PAGE, re.MULTILINE)
    assert len(lines) == 4
    for text, first, hashed in lines:
        id_ = int(text.replace("−", "-"))
        assert f"{hashes_of(np.array([id_]))[0]:016x}" == first
        assert f"{murmur(id_ & WORD):016x}" == hashed
