"""Messages made by rule: a good request, and one to three things done to it."""

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.fuzz.contract import Model
from tests.fuzz.good import NUMBERS, Random, add_input, good_request, pick

HUGE = (2**31 - 1, 2**31, 2**32, 2**40, 2**61 + 1, 2**62, 2**63 - 1)
IDS = (-1, -(2**31), -(2**63), 2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1)
LENGTHS = (-1, -(2**31), 2**31 - 1, 2**30, 1 << 20)
WORDS = (
    "",
    ",",
    "x",
    "values",
    "embeddings",
    "sequences",
    "like",
    "both",
    "price",
    "nobody",
    "x,x",
    "x" * 10_000,
    "\0",
    "ü",
    "../../etc",
    "x, y",
    "x,",
)
BAD_UTF8 = b"\xff\xfe\xc0"
# Replaced by bytes that are no UTF-8 after serializing, as long.
_MARK = "\x01@\x01"


def bad(model: Model, random: Random) -> bytes:
    """A request that most often does not."""
    request = good_request(model, random)
    for _ in range(random.integers(1, 4)):
        MUTATIONS[random.integers(len(MUTATIONS))](request, model, random)
    message: bytes = request.SerializeToString().replace(_MARK.encode(), BAD_UTF8)
    return _of_bytes(message, random) if random.random() < 0.1 else message


def thieves(model: Model, random: Random) -> list[bytes]:
    """Two requests whose lengths add up only together: merged, the first would be answered from the ids of the second."""
    messages: list[bytes] = []
    while len(messages) < 2:
        request = good_request(model, random)
        lengths = np.frombuffer(request.raw_input_contents[1], np.int32).copy()
        if lengths.any():
            lengths[lengths.argmax()] += -1 if messages else 1
            request.raw_input_contents[1] = lengths.tobytes()
            messages.append(request.SerializeToString())
    return messages


def inputs_of(message: bytes) -> list[Any]:
    """The inputs of a message, or none if it is no ModelInferRequest."""
    with suppress(Exception):
        return list(pb.ModelInferRequest.FromString(message).inputs)
    return []


def is_known_to_hang(message: bytes) -> bool:
    """Triton never answers a request whose first dimension is 0 on every input."""
    return any(tensor.shape and tensor.shape[0] == 0 for tensor in inputs_of(message))


def is_known_to_kill(message: bytes) -> bool:
    """Triton 2.51 multiplies a shape's sizes without a look at overflow: what wraps around passes its check."""
    for tensor in inputs_of(message):
        size = 8
        for dim in tensor.shape:
            size *= dim
        if abs(size) >= 2**63:
            return True
    return False


def _which(request: "pb.ModelInferRequest", random: Random) -> int | None:
    there = min(len(request.inputs), len(request.raw_input_contents))
    return int(random.integers(there)) if there else None


def _shape(request: "pb.ModelInferRequest", _: Model, random: Random) -> None:
    """Ranks, zeros, negative and huge sizes."""
    if (index := _which(request, random)) is not None:
        size = min(request.inputs[index].shape[-1], 1 << 40) if request.inputs[index].shape else 1
        shapes: tuple[tuple[int, ...], ...] = (
            (), (size,), (1, 1, size), (size, 1), (1, size, 1), (2, size), (1, size + 1), (1, size - 1), (-1, size),
            (1, -1), (-1, -size), (1, 0), *((1, huge) for huge in HUGE), *((huge, huge) for huge in HUGE), (1,) * 100,
        )  # fmt: skip
        del request.inputs[index].shape[:]
        request.inputs[index].shape.extend(shapes[random.integers(len(shapes))])


def _datatype(request: "pb.ModelInferRequest", _: Model, random: Random) -> None:
    kinds = ("", "INT32", "INT64", "FP32", "FP16", "BYTES", "BOOL", "UINT64", "int64", "INT64 ", "INT65", _MARK)
    if (index := _which(request, random)) is not None:
        request.inputs[index].datatype = str(pick(random, kinds))


def _raw(request: "pb.ModelInferRequest", _: Model, random: Random) -> None:
    """Contents that are truncated, longer, empty, missing or more."""
    if (index := _which(request, random)) is None:
        return
    raw = request.raw_input_contents[index]
    what = random.integers(6)
    if what == 0:
        request.raw_input_contents[index] = raw[: random.integers(len(raw) + 1)]
    elif what == 1:
        request.raw_input_contents[index] = raw + random.bytes(int(random.integers(1, 64)))
    elif what == 2:
        request.raw_input_contents[index] = b""
    elif what == 3:
        del request.raw_input_contents[index]
    elif what == 4:
        request.raw_input_contents.append(raw)
    else:
        request.raw_input_contents[index] = random.bytes(len(raw))


def _numbers(request: "pb.ModelInferRequest", model: Model, random: Random) -> None:
    """Ids, lengths and dense numbers at every boundary."""
    if (index := _which(request, random)) is None:
        return
    raw, name = request.raw_input_contents[index], request.inputs[index].name
    kind, size = ("<q", 8) if name == "values" else ("<i", 4) if name == "lengths" else ("<f", 4)
    if len(raw) >= size:
        rows = [len(feature.numbers) for feature in model.features.values()]
        edges: Sequence[float] = [*IDS, *rows, *(row - 1 for row in rows), 0]
        if name != "values":
            edges = [*LENGTHS, 0, 1] if name == "lengths" else NUMBERS
        start = int(random.integers(len(raw) // size)) * size
        number = struct.pack(kind, edges[int(random.integers(len(edges)))])
        request.raw_input_contents[index] = raw[:start] + number + raw[start + size :]


def _moved(request: "pb.ModelInferRequest", _: Model, random: Random) -> None:
    """An id that goes from a bag to the next one: lengths add up as before, and may be what a model does not take."""
    if len(request.raw_input_contents) < 2 or len(request.raw_input_contents[1]) % 4:
        return
    lengths = np.frombuffer(request.raw_input_contents[1], np.int32).copy()
    if (bags := np.flatnonzero(lengths > 0)).size and lengths.size > 1:
        bag = int(bags[random.integers(bags.size)])
        lengths[bag] -= 1
        with np.errstate(over="ignore"):  # the other may be the largest there is
            lengths[(bag + 1) % lengths.size] += 1
        request.raw_input_contents[1] = lengths.tobytes()


def _typed(request: "pb.ModelInferRequest", _: Model, random: Random) -> None:
    """Numbers in typed fields, beside the raw ones or instead."""
    if (index := _which(request, random)) is not None:
        field = str(pick(random, ("int64_contents", "int_contents", "fp32_contents", "bool_contents")))
        getattr(request.inputs[index].contents, field).extend([1, 0, 1])
        if random.random() < 0.5:
            del request.raw_input_contents[:]


def _inputs(request: "pb.ModelInferRequest", _: Model, random: Random) -> None:
    """Inputs that are missing, twice, swapped, or called otherwise."""
    if (index := _which(request, random)) is None:
        return
    what = random.integers(5)
    if what == 0:
        del request.inputs[index]
        del request.raw_input_contents[index]
    elif what == 1:
        request.inputs.add().CopyFrom(request.inputs[index])
        request.raw_input_contents.append(request.raw_input_contents[index])
    elif what == 2:
        request.inputs[index].name = str(pick(random, (*WORDS, _MARK)))
    elif what == 3:
        raw = list(request.raw_input_contents)[::-1]
        del request.raw_input_contents[:]
        request.raw_input_contents.extend(raw)
    else:
        add_input(request, "weights", "FP32", np.ones(len(request.raw_input_contents[0]) // 8, np.float32))


def _dense_rows(request: "pb.ModelInferRequest", model: Model, random: Random) -> None:
    """Dense inputs of a sample more or less, of another width, of another dtype, of another's name, or none."""
    numbers_of_dense = [number for number, tensor in enumerate(request.inputs) if tensor.name in model.dense]
    if not numbers_of_dense or len(request.raw_input_contents) < len(request.inputs):
        return
    tensor, number = request.inputs[numbers_of_dense[0]], numbers_of_dense[0]
    samples, width = tensor.shape[1:] if len(tensor.shape) == 3 else (1, 1)
    samples = min(samples, 1000)  # it may have been changed before
    shapes = ((samples + 1, width), (max(samples - 1, 0), width), (samples, width + 1), (width, samples), (0, width))
    what = random.integers(5)
    if what == 0 or what == 1:
        changed = np.ones(shapes[random.integers(len(shapes))], np.float32 if what else np.float64)
        tensor.datatype = "FP32" if what else "FP64"
        tensor.shape[:] = [1, *changed.shape]
        request.raw_input_contents[number] = changed.tobytes()
    elif what == 2:
        del request.inputs[number]
        del request.raw_input_contents[number]
    elif what == 3:
        tensor.name = next(name for name in (*model.dense, "") if name != tensor.name)
    else:
        add_input(request, str(pick(random, (*WORDS, *model.dense))), "FP32", np.ones((1, 3), np.float32))


def _names(request: "pb.ModelInferRequest", model: Model, random: Random) -> None:
    """What is asked for: nobody's names, others', and those of features for tables."""
    names = list(pick(random, (model.features, model.tables)))  # type: ignore[call-overload]
    words = (*WORDS, _MARK, ",".join(names), ",".join(names) + ",", ",".join(names * 2000))
    parameter = request.parameters[str(pick(random, ("features", "tables")))]
    what = random.integers(5)
    if what < 3:
        parameter.string_param = str(pick(random, words))
    elif what == 3:
        parameter.int64_param = int(random.integers(-(2**62), 2**62))
    else:
        parameter.bool_param = True


def _shared(request: "pb.ModelInferRequest", model: Model, random: Random) -> None:
    """What comes once, and does not: some names, nobody's, and no names."""
    names = [*model.features, *model.tables, *model.dense]
    some = [names[n] for n in random.permutation(len(names))[: random.integers(1, 4)]]
    parameter = request.parameters["once"]
    if random.random() < 0.8:
        parameter.string_param = str(pick(random, (*WORDS, _MARK, *[",".join(some)] * 20)))
    else:
        parameter.int64_param = 1


def _parameters(request: "pb.ModelInferRequest", _: Model, random: Random) -> None:
    """What Triton gives a meaning to, with absurd values."""
    names = (
        "sequence_id", "sequence_start", "priority", "timeout", "binary_data_size", "shared_memory_region",
        "shared_memory_byte_size", "shared_memory_offset", "triton_enable_empty_final_response", "traceparent",
        "classification", "triton_", "", "x" * 1000,
    )  # fmt: skip
    holders = [request.parameters]
    if (index := _which(request, random)) is not None:
        holders.append(request.inputs[index].parameters)
    parameter = holders[random.integers(len(holders))][str(pick(random, names))]
    what = random.integers(3)
    if what == 0:
        parameter.int64_param = int(pick(random, (-1, 0, 1, 2**62, -(2**63))))  # type: ignore[call-overload]
    elif what == 1:
        parameter.string_param = str(pick(random, (*WORDS, _MARK)))
    else:
        parameter.bool_param = bool(random.integers(2))


def _outputs(request: "pb.ModelInferRequest", model: Model, random: Random) -> None:
    if random.random() < 0.3:
        del request.outputs[:]
    for _number in range(random.integers(1, 4)):
        output = request.outputs.add(name=str(pick(random, (*model.outputs, *WORDS))))
        if random.random() < 0.5:
            name = str(pick(random, ("classification", "shared_memory_region", "shared_memory_byte_size", "binary")))
            if random.random() < 0.5:
                output.parameters[name].int64_param = int(pick(random, (-1, 0, 1, 2**62)))  # type: ignore[call-overload]
            else:
                output.parameters[name].string_param = str(pick(random, WORDS))


def _model(request: "pb.ModelInferRequest", _: Model, random: Random) -> None:
    if random.random() < 0.5:
        request.model_name = str(pick(random, (*WORDS, "m/1", "m\0", "m", "rows", _MARK)))
    else:
        request.model_version = str(pick(random, ("0", "-1", "2", "1.0", "99999999999999999999", "one", " 1", _MARK)))


def _id(request: "pb.ModelInferRequest", _: Model, random: Random) -> None:
    request.id = str(pick(random, (*WORDS, "i" * 100_000, _MARK)))


def _gigantic(request: "pb.ModelInferRequest", model: Model, random: Random) -> None:
    """More ids, samples or rows than anyone may ask for."""
    del request.inputs[:]
    del request.raw_input_contents[:]
    count = int(random.choice((6_000, 100_000, 1_000_000)))
    if random.random() < 0.5:
        parameter = "tables" if "tables" in request.parameters else "features"
        request.parameters[parameter].string_param = str(pick(random, list(getattr(model, parameter))))
    if random.random() < 0.5:
        add_input(request, "values", "INT64", np.zeros(count, np.int64))
        add_input(request, "lengths", "INT32", np.array([count], np.int32))
    else:
        add_input(request, "values", "INT64", np.zeros(0, np.int64))
        add_input(request, "lengths", "INT32", np.zeros(count, np.int32))


def _empty(request: "pb.ModelInferRequest", _: Model, random: Random) -> None:
    name = request.model_name
    request.Clear()
    if random.random() < 0.8:
        request.model_name = name


MUTATIONS: tuple[Callable[["pb.ModelInferRequest", Model, Random], None], ...] = (
    *(_shape, _raw, _numbers, _numbers, _moved, _names, _parameters, _inputs, _dense_rows, _shared) * 3,
    *(_datatype, _typed, _outputs, _model, _id) * 2,
    _gigantic,
    _empty,
)


def _of_bytes(message: bytes, random: Random) -> bytes:
    """Below protobuf: cut off, flipped, repeated, or nothing but noise."""
    what = random.integers(4)
    if what == 0:
        return message[: random.integers(len(message) + 1)]
    if what == 1 and message:
        flipped = bytearray(message)
        for _ in range(random.integers(1, 9)):
            flipped[random.integers(len(flipped))] ^= 1 << random.integers(8)
        return bytes(flipped)
    if what == 2:
        return message + message[: random.integers(len(message) + 1)]
    return random.bytes(int(random.integers(0, 2000)))
