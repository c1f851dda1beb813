"""Requests that keep to the contract, made by rule."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2 as pb

from tests.fuzz.contract import Dense, Model

Random = np.random.Generator

# Dense numbers at every boundary. The last two are in the range of FP32, and their sums are not.
NUMBERS = (np.nan, np.inf, -np.inf, -0.0, 1e-45, 1e6, 3.4e38, -3.4e38)


def good(model: Model, random: Random) -> bytes:
    """A request that keeps to the contract, over some features in some order."""
    message: bytes = good_request(model, random).SerializeToString()
    return message


def good_request(model: Model, random: Random) -> "pb.ModelInferRequest":
    """A lookup; or rows of tables; or, of a model that has them, scores."""
    what = random.random()
    if what < 0.15:
        request, _, _ = _asking(model, "tables", random)
        outputs = ["sequences"]
    elif what < 0.6 and model.scores is not None:
        request, samples, ids = _asking(model, "features", random, every=True)
        shared = request.parameters["once"].string_param.split(",") if "once" in request.parameters else []
        by_sample = [name for name, value in model.dense.items() if value.key is None]
        single = [name for name in by_sample if random.random() < 0.2 and len(shared) < len(model.features)]
        for name in random.permutation(list(model.dense)).tolist():
            spec = model.dense[name]
            rows = ids[spec.key] if spec.key is not None else 1 if name in single else samples
            add_input(request, name, spec.datatype, _dense(random, rows, spec))
        if single:
            request.parameters["once"].string_param = ",".join((*shared, *single))
        scores = list(model.scores.names)
        outputs = scores[: random.integers(1, len(scores) + 1)] + ["embeddings", "once"] * int(random.integers(2))
    else:
        request, _, _ = _asking(model, "features", random)
        outputs = list(random.permutation(("embeddings", "sequences"))[: random.integers(1, 3)])
        outputs += ["once"] if "embeddings" in outputs or random.random() < 0.5 else []
    # Without outputs, all are asked for. So a lookup of a model with scores has to name some.
    is_lookup = "tables" not in request.parameters and len(request.inputs) == 2
    if random.random() < 0.5 or (model.scores is not None and is_lookup):
        for name in outputs:
            request.outputs.add(name=name)
    return request


def _asking(
    model: Model, parameter: str, random: Random, *, every: bool = False
) -> tuple["pb.ModelInferRequest", int, dict[str, int]]:
    """A request for some features or tables, in some order, or for all features; and how many samples it has, and how
    many ids of each.
    """
    available = model.tables if parameter == "tables" else model.features
    names = list(available)
    count = len(names) if every else random.integers(1, len(names) + 1)
    names_of_request = [names[n] for n in random.permutation(len(names))[:count]] if random.random() < 0.8 else names
    samples = int(random.choice((0, 1, 2, 17)))
    shared = [name for name in names_of_request if parameter == "features" and random.random() < 0.5] * int(
        random.random() < 0.4
    )
    fixed, together = (model.scores.fixed, model.scores.together) if every and model.scores is not None else ({}, ())
    if 0 < len({*together} & {*shared}) < len(together):
        shared = [name for name in shared if name not in together]
    if len(shared) == len(names_of_request):
        samples = 1
    by_name = {
        name: random.integers(fixed.get(name, 0), fixed.get(name, 4) + 1, 1 if name in shared else samples).astype(
            np.int32
        )
        for name in names_of_request
    }
    for name in together[1:]:
        by_name[name] = by_name[together[0]]
    lengths = list(by_name.values())
    ids = [random.choice(available[name].ids, bags.sum()) for name, bags in by_name.items()]
    request = pb.ModelInferRequest(model_name=model.name)
    add_input(request, "values", "INT64", np.concatenate(ids) if ids else np.zeros(0, np.int64))
    add_input(request, "lengths", "INT32", np.concatenate(lengths))
    if shared:
        request.parameters["once"].string_param = ",".join(shared)
    if names_of_request != list(model.features) or random.random() < 0.5:
        request.parameters[parameter].string_param = ",".join(names_of_request)
    return request, samples, {name: int(bags.sum()) for name, bags in by_name.items()}


def _dense(random: Random, rows: int, of: Dense) -> "npt.NDArray[Any]":
    """Numbers, a row for each sample or id, some of which may be none."""
    shape = (rows, *of.shape)
    if of.datatype != "FP32":
        last = 1 if of.datatype == "BOOL" else np.iinfo(of.dtype).max
        return random.integers(0 if of.datatype == "BOOL" else -last, last, shape, endpoint=True).astype(of.dtype)
    numbers = random.normal(size=shape).astype(np.float32)
    if numbers.size and random.random() < 0.3:
        numbers.flat[random.integers(numbers.size)] = pick(random, NUMBERS[:-2])
    return numbers


def add_input(request: "pb.ModelInferRequest", name: str, datatype: str, array: "npt.NDArray[Any]") -> None:
    """Add an input, [1, *shape]."""
    request.inputs.add(name=name, datatype=datatype, shape=[1, *array.shape])
    request.raw_input_contents.append(array.tobytes())


def pick(random: Random, values: Sequence[object]) -> object:
    """One of some values."""
    return values[int(random.integers(len(values)))]
