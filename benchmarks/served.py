"""What our backend adds to Triton: our model against one that does nothing but return as many bytes."""

import shutil
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks.inprocess import lookup
from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.model_memory import in_memory
from benchmarks.workload import NAME, WIDTH, Arrays, Workload
from serving.engine import Engine
from serving.requests.types import Tensors
from serving.server import Ports, run_server

DO_NOTHING = Path(__file__).parent / "donothing.py"
REQUESTS = 16
ROUNDS = {1: 1000, 128: 600}


def run(workload: Workload) -> list[Result]:
    """One client, one request at a time; both models behind the same server, called in turn."""
    repository = workload.bundle.parent.parent
    for samples in ROUNDS:
        publish_do_nothing(repository, samples, (1, samples, WIDTH))
    engine = in_memory(workload.bundle)
    results = []
    with (
        run_server(
            repository, Ports(grpc=0, http=0, operations=0), models=[NAME, *map(do_nothing_name, ROUNDS)]
        ) as server,
        triton.InferenceServerClient(server.grpc) as client,
    ):
        for samples, rounds in ROUNDS.items():
            requests = [workload.request(samples, seed) for seed in range(REQUESTS)]
            inputs = [inputs_of(request) for request in requests]
            _check(client, engine, requests[0], inputs[0], samples)
            candidates = _candidates(client, engine, requests, inputs, samples)
            times = {name: p50(seconds) for name, seconds in interleave(candidates, rounds).items()}
            results += [Result(f"{name}_p50_b{samples}_s", times[name]) for name in ("served", "donothing")]
            results.append(ratio(f"served_over_donothing_p50_b{samples}", times["served"] / times["donothing"]))
            results.append(
                ratio(
                    f"served_minus_donothing_over_inprocess_p50_b{samples}",
                    (times["served"] - times["donothing"]) / times["inprocess"],
                )
            )
    return results


def _candidates(
    client: Any, engine: Engine, requests: list[Arrays], inputs: list[Any], samples: int
) -> dict[str, Callable[[], Any]]:
    ours, nothing_inputs, local = cycle(inputs), cycle(inputs), cycle(requests)
    return {
        "served": lambda: client.infer(NAME, next(ours)).as_numpy("embeddings"),
        "donothing": lambda: client.infer(do_nothing_name(samples), next(nothing_inputs)).as_numpy("embeddings"),
        "inprocess": lambda: lookup(engine, next(local)),
    }


def _check(client: Any, engine: Engine, request: Arrays, inputs: Any, samples: int) -> None:
    """Ours answers right, and the other returns just as many bytes."""
    answer = client.infer(NAME, inputs).as_numpy("embeddings")
    np.testing.assert_array_equal(answer[0], lookup(engine, request))
    assert client.infer(do_nothing_name(samples), inputs).as_numpy("embeddings").nbytes == answer.nbytes


def inputs_of(request: Arrays | Tensors) -> list[Any]:
    """The inputs of a KServe request."""
    inputs = []
    for name, dtype, array in (("values", "INT64", request.values), ("lengths", "INT32", request.lengths)):
        tensor = triton.InferInput(name, [1, array.size], dtype)
        tensor.set_data_from_numpy(array[np.newaxis])
        inputs.append(tensor)
    return inputs


def do_nothing_name(samples: int) -> str:
    return f"donothing_b{samples}"


def publish_do_nothing(
    repository: Path, samples: int, shape: Sequence[int], like: str = NAME, output: str = "embeddings"
) -> None:
    """A model with the config of our model `like`, but for the name and the model.py; answers `output` of `shape`."""
    model = repository / do_nothing_name(samples)
    (model / "1").mkdir(parents=True, exist_ok=True)
    config = text_format.Parse((repository / like / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    config.name = model.name
    config.parameters["shape"].string_value = ",".join(map(str, shape))
    config.parameters["output"].string_value = output
    (model / "config.pbtxt").write_text(text_format.MessageToString(config))
    shutil.copy(DO_NOTHING, model / "1" / "model.py")
