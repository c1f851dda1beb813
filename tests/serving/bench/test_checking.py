"""What is wrong with an answer is found, and nothing else."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from export import ExportConfig, OutputDtype, WeightDtype, export_model
from serving.bench.checking import Checker
from serving.bench.requests import Distribution, Prepared, random_requests
from serving.bundle.load import Bundle, open_bundle
from serving.bundle.scores import DenseDtype
from serving.bundle.tensor_names import EMBEDDINGS
from serving.engine import Engine
from serving.errors import ConfigurationError
from serving.requests.captured import CapturedRequest, read_captured
from serving.requests.types import Tensors
from tests.support.long_cases import one_in
from tests.support.models import MIXED, collection
from tests.support.ranker import ranker
from tests.support.scored_models import EXACT, two_tower

CONFIGS = {
    "exact": EXACT,
    "int4": replace(EXACT, dtype={"*": WeightDtype.INT4}),
    "fp16": replace(EXACT, output_dtype=OutputDtype.FP16),
    "bf16": replace(EXACT, dense_dtype=DenseDtype.BF16),
    "int8": replace(EXACT, dense_dtype=DenseDtype.INT8),
}


def response(outputs: Mapping[str, Any], version: str = "1") -> bytes:
    message = pb.ModelInferResponse(model_version=version)
    for name, array in outputs.items():
        datatype = "FP16" if array.dtype == np.float16 else "FP32"
        message.outputs.add(name=name, datatype=datatype, shape=[1, *array.shape])
        message.raw_output_contents.append(array.tobytes())
    encoded: bytes = message.SerializeToString()
    return encoded


def prepared_for(bundle: Bundle, samples: int = 5, *, scores: bool = True) -> Prepared:
    factors = dict.fromkeys(bundle.manifest.keys, 3.0)
    tensors, *_ = random_requests(bundle.manifest, samples, Distribution(), factors, scores=scores)
    return Prepared(tensors, b"", samples)


def test_an_answer_of_another_version_or_shape_is_wrong(tmp_path: Path) -> None:
    bundle = open_bundle(export_model(collection(MIXED), tmp_path, "m"))
    checker, request = Checker(bundle), prepared_for(bundle, 2, scores=False)
    answer = Engine(bundle).outputs(request.tensors)[EMBEDDINGS]
    assert checker.differences_of(request, response({"embeddings": answer})) == []
    assert "version" in checker.differences_of(request, response({"embeddings": answer}, "2"))[0]
    assert "shape" in checker.differences_of(request, response({"embeddings": answer.reshape(1, -1)}))[0]
    (line, *_) = checker.differences_of(request, response({"embeddings": answer + 1}))
    assert "an answer is off by 1" in line


@pytest.mark.parametrize("name", one_in(3, CONFIGS))
def test_scores_are_compared_with_the_dense_part_over_the_rows(name: str, tmp_path: Path) -> None:
    for model in (ranker(), two_tower()):
        bundle = open_bundle(export_model(model.eval(), tmp_path, type(model).__name__, CONFIGS[name]))
        checker, engine = Checker(bundle), Engine(bundle)
        part = bundle.manifest.dense_part
        assert part is not None
        for samples in (0, 1, 40):
            request = prepared_for(bundle, samples)
            assert list(request.tensors.outputs) == [output.name for output in part.outputs]
            answer = dict(engine.outputs(request.tensors))
            assert checker.differences_of(request, response(answer)) == []
        # As a wrong id would: one sample gets the scores of another.
        for output in answer:
            changed = answer | {output: np.roll(answer[output], 1, axis=0)}
            (line,) = checker.differences_of(request, response(changed))
            assert line.startswith(f"output {output!r}: a score is off by ")


def test_answers_must_have_exactly_the_requested_outputs(tmp_path: Path) -> None:
    bundle = open_bundle(export_model(ranker(), tmp_path, "m", EXACT))
    checker, engine, both = Checker(bundle), Engine(bundle), prepared_for(bundle)
    tensors = replace(both.tensors, outputs=["both", "embeddings"])
    answer = dict(engine.outputs(tensors))
    assert answer.keys() == {"both", "embeddings"}
    request = replace(both, tensors=tensors)
    assert checker.differences_of(request, response(answer)) == []
    (line,) = checker.differences_of(request, response(answer | {"embeddings": answer["embeddings"] + 1}))[:1]
    assert "feature 'x': an answer is off by 1" in line
    assert "shapes" in checker.differences_of(both, response(answer))[0]
    assert "shapes" in checker.differences_of(request, response({"both": answer["both"]}))[0]


def test_shared_features_are_checked(tmp_path: Path) -> None:
    """As it is captured, and sent again."""
    bundle = open_bundle(export_model(ranker(), tmp_path, "m", EXACT))
    checker, engine, whole = Checker(bundle), Engine(bundle), prepared_for(bundle)
    keys = bundle.manifest.keys
    lengths = dict(zip(keys, whole.tensors.lengths.reshape(len(keys), -1), strict=True))
    values = dict(
        zip(keys, np.split(whole.tensors.values, np.cumsum([e.sum() for e in lengths.values()])[:-1]), strict=True)
    )
    (key, *_), (name, *_) = keys, whole.tensors.dense
    lengths[key], values[key] = lengths[key][:1], values[key][: lengths[key][0]]
    sent = Tensors(
        None,
        np.concatenate([*values.values()]),
        np.concatenate([*lengths.values()]),
        outputs=[*whole.tensors.outputs, "embeddings", "once"],
        dense={**whole.tensors.dense, name: whole.tensors.dense[name][:1]},
        shared=[key, name],
    )
    (tmp_path / "captured.jsonl").write_bytes(msgspec.json.encode(CapturedRequest.of(sent, "", "slow: 9 ms")))
    (captured,) = read_captured(tmp_path / "captured.jsonl")
    request = Prepared(captured.tensors, b"", 5)
    answer = dict(engine.outputs(captured.tensors))
    assert {output: len(value) for output, value in answer.items()} == {
        "embeddings": 5,
        "once": 1,
        "like": 5,
        "both": 5,
    }
    assert checker.differences_of(request, response(answer)) == []
    for output in ("once", "like"):
        (line, *_) = checker.differences_of(request, response(answer | {output: answer[output] + 1}))
        assert "is off by 1" in line or "is off by 0.99" in line


def test_a_user_side_is_drawn_once(tmp_path: Path) -> None:
    bundle = open_bundle(export_model(ranker(), tmp_path, "m", EXACT))
    shared = ["x", "user"]
    factors = dict.fromkeys(bundle.manifest.keys, 3.5)
    requests = random_requests(bundle.manifest, 20, Distribution(), factors, scores=True, shared=shared)
    checker, engine = Checker(bundle), Engine(bundle)
    for tensors in requests[:3]:
        assert tensors.lengths.size == 1 + 20 + 20
        assert {name: len(rows) for name, rows in tensors.dense.items()} == {"user": 1, "item": 20}
        answer = dict(engine.outputs(tensors))
        assert checker.differences_of(Prepared(tensors, b"", 20), response(answer)) == []


def test_nan_scores_are_accepted_only_where_expected(tmp_path: Path) -> None:
    bundle = open_bundle(export_model(ranker(), tmp_path, "m", EXACT))
    checker, engine, request = Checker(bundle), Engine(bundle), prepared_for(bundle)
    answer = dict(engine.outputs(request.tensors))
    answer["like"] = np.where(np.arange(5) == 3, np.float32(np.nan), answer["like"])
    assert "'like': a score is off by nan" in checker.differences_of(request, response(answer))[0]
    user = np.array(request.tensors.dense["user"])
    user[3] = np.nan
    tensors: Tensors = replace(request.tensors, dense={**request.tensors.dense, "user": user})
    request = replace(request, tensors=tensors)
    assert checker.differences_of(request, response(engine.outputs(tensors))) == []


def test_a_bundle_without_scores_is_asked_for_none(tmp_path: Path) -> None:
    bundle = open_bundle(export_model(collection(), tmp_path, "m", ExportConfig()))
    with pytest.raises(ConfigurationError, match="scores: expected a bundle with scores"):
        prepared_for(bundle)
