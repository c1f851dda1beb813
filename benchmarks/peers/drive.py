"""Load on several servers in turn: closed loops over requests made beforehand, the same ids for all.

    python drive.py PLAN.json

PLAN says which candidates there are, where, and which loads to put on them; a line of JSON is printed for each
candidate and load, and one for each candidate that could not be reached or answered otherwise than it should.
"""

import asyncio
import base64
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import aiohttp
import grpc.aio
import numpy as np
import on_hosts
from arrays import Arrays, pack
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from kserve import request as kserve_request
from redis_rows import Call, Redis
from tritonclient.grpc import service_pb2 as pb

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
READY_S = float(os.environ.get("BENCH_READY_S", "60"))
TIMEOUT_S = 30


class Grpc:
    """ModelInfer with a tensor for each array."""

    method = MODEL_INFER

    @asynccontextmanager
    async def connected(self, address: str) -> AsyncIterator[Call]:
        async with grpc.aio.insecure_channel(address, UNLIMITED) as channel:
            call = channel.unary_unary(self.method)
            yield lambda message: call(message, timeout=TIMEOUT_S)

    def prepare(self, arrays: Arrays, ours: bytes) -> object:
        return kserve_request(arrays).SerializeToString()

    def read(self, answer: bytes, samples: int) -> np.ndarray:
        message = pb.ModelInferResponse.FromString(answer)
        if message.raw_output_contents:
            return np.frombuffer(message.raw_output_contents[0], np.float32).reshape(samples, -1)
        return np.array(message.outputs[0].contents.fp32_contents, np.float32).reshape(samples, -1)


class Ours(Grpc):
    """ModelInfer with `values` and `lengths`, which were made elsewhere."""

    def prepare(self, arrays: Arrays, ours: bytes) -> object:
        return ours


class Nothing(Grpc):
    """The same, to models that do nothing; there is one for each number of samples."""

    def prepare(self, arrays: Arrays, ours: bytes) -> object:
        message = pb.ModelInferRequest.FromString(ours)
        message.model_name = f"donothing_b{len(arrays['ids'])}"
        return message.SerializeToString()


class TorchServe(Grpc):
    """Its own gRPC service: https://github.com/pytorch/serve, frontend/server/src/main/resources/proto."""

    method = PREDICTIONS

    def __init__(self) -> None:
        file = descriptor_pb2.FileDescriptorProto(name="peers.proto", package="peers", syntax="proto3")
        kinds = descriptor_pb2.FieldDescriptorProto
        request = file.message_type.add(name="PredictionsRequest")
        request.field.add(name="model_name", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
        entry = request.nested_type.add(name="InputEntry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
        entry.field.add(name="value", number=2, type=kinds.TYPE_BYTES, label=kinds.LABEL_OPTIONAL)
        entry_type = ".peers.PredictionsRequest.InputEntry"
        request.field.add(
            name="input", number=3, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_REPEATED, type_name=entry_type
        )
        answered = file.message_type.add(name="PredictionResponse")
        answered.field.add(name="prediction", number=1, type=kinds.TYPE_BYTES, label=kinds.LABEL_OPTIONAL)
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        self.request, self.answered = (
            message_factory.GetMessageClass(pool.FindMessageTypeByName(f"peers.{name}"))
            for name in ("PredictionsRequest", "PredictionResponse")
        )

    def prepare(self, arrays: Arrays, ours: bytes) -> object:
        return self.request(model_name="tables", input={"data": pack(arrays)}).SerializeToString()

    def read(self, answer: bytes, samples: int) -> np.ndarray:
        return np.frombuffer(self.answered.FromString(answer).prediction, np.float32).reshape(samples, -1)


class Http:
    """POST raw bytes."""

    def __init__(self, path: str) -> None:
        self.path = path

    @asynccontextmanager
    async def connected(self, address: str) -> AsyncIterator[Call]:
        headers = {"content-type": "application/json" if isinstance(self, Base64) else "application/octet-stream"}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        # uvicorn closes a connection that idles for 5 s, as it does while others have their turn.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

            async def call(message: object) -> bytes:
                async with session.post(f"http://{address}{self.path}", data=message, headers=headers) as response:
                    response.raise_for_status()
                    return await response.read()

            yield call

    def prepare(self, arrays: Arrays, ours: bytes) -> object:
        return pack(arrays)

    def read(self, answer: bytes, samples: int) -> np.ndarray:
        return np.frombuffer(answer, np.float32).reshape(samples, -1)


class Base64(Http):
    """JSON with the same bytes in base64."""

    def prepare(self, arrays: Arrays, ours: bytes) -> object:
        return json.dumps({"data": base64.b64encode(pack(arrays)).decode()}).encode()


def protocol(name: str, folder: Path) -> Grpc | Http | Redis | on_hosts.RayRanks:
    """What a candidate speaks."""
    return {
        "kserve": Grpc,
        "ours": Ours,
        "nothing": Nothing,
        "torchserve": TorchServe,
        "mosec": lambda: Http("/inference"),
        "litserve": lambda: Base64("/predict"),
        "redis": lambda: Redis(folder),
        "redis_hosts": lambda: on_hosts.RedisHosts(folder),
        "ray_ranks": lambda: on_hosts.RayRanks(folder),
    }[name]()


class Candidate:
    """A server that is up, and what it is asked."""

    def __init__(self, plan: dict, name: str, folder: Path) -> None:
        self.name = name
        self.protocol = protocol(plan["protocol"], folder)
        self.address = plan["address"]
        self.tolerance = plan["tolerance"]
        self.requests: dict[int, list[object]] = {}

    async def ready(self, call: Call, samples: int) -> bytes:
        """Its first answer."""
        end = time.monotonic() + READY_S
        while True:
            try:
                return await call(self.requests[samples][0])
            except Exception:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.25)

    async def closed(self, call: Call, samples: int, clients: int, seconds: float) -> tuple[list[float], float]:
        """Latencies of so many clients, each asking again when it was answered; and how long that took."""
        latencies: list[float] = []
        requests = self.requests[samples]
        started = time.perf_counter()
        turn = 0

        async def one() -> None:
            nonlocal turn
            while (started_at := time.perf_counter()) < started + seconds:
                turn += 1
                await call(requests[turn % len(requests)])
                latencies.append(time.perf_counter() - started_at)

        async with asyncio.TaskGroup() as group:  # ends the others when one fails
            for _ in range(clients):
                group.create_task(one())
        return latencies, time.perf_counter() - started


def say_absent(candidate: str, error: Exception) -> None:
    print(json.dumps({"candidate": candidate, "absent": f"{type(error).__name__}: {error}"[:300]}), flush=True)


async def main(plan: dict) -> None:
    folder = Path(plan["folder"])
    requests = {samples: dict(np.load(folder / f"requests_{samples}.npz")) for samples in plan["samples"]}
    up: list[tuple[Candidate, Call]] = []
    stack = []
    for name, description in plan["candidates"].items():
        candidate = Candidate(description, name, folder)
        for samples, saved in requests.items():
            inputs = {name: saved[name] for name in ("ids", "dense") if name in saved}
            candidate.requests[samples] = [
                candidate.protocol.prepare(
                    {name: array[number] for name, array in inputs.items()}, saved["ours"][start:end].tobytes()
                )
                for number, (start, end) in enumerate(pairwise(saved["ends"]))
            ]
        context = AsyncExitStack()
        try:
            call = await context.enter_async_context(candidate.protocol.connected(candidate.address))
            for samples, saved in requests.items():
                answer = candidate.protocol.read(await candidate.ready(call, samples), samples)
                error = float(np.abs(answer - saved["answer"]).max())
                if candidate.tolerance is not None and not error <= candidate.tolerance:
                    raise ValueError(f"answers are off by {error:.3g}, more than {candidate.tolerance:.3g}")
        except Exception as error:  # whatever a peer does, the others are measured
            say_absent(name, error)
            await context.aclose()
            continue
        stack.append(context)
        up.append((candidate, call))
    for samples, clients in plan["loads"]:
        runs_by_candidate = {candidate.name: [] for candidate, _ in up}
        for round_ in range(plan["rounds"] + 1):
            for candidate, call in random.sample(up, len(up)):
                seconds = plan["seconds"] if round_ else plan["warm_up_s"]
                try:
                    run = await candidate.closed(call, samples, clients, seconds)
                except ExceptionGroup as errors:
                    say_absent(candidate.name, errors.exceptions[0])
                    up.remove((candidate, call))
                    continue
                if round_:
                    runs_by_candidate[candidate.name].append(run)
        for candidate, _ in up:
            name, runs = candidate.name, runs_by_candidate[candidate.name]
            latencies = np.concatenate([latencies for latencies, _ in runs])
            rates = [len(latencies) / seconds for latencies, seconds in runs]
            line = {
                "candidate": name,
                "samples": samples,
                "clients": clients,
                "answers_per_s": float(np.median(rates)),
            }
            line |= {f"p{percent}_s": float(np.percentile(latencies, percent)) for percent in (50, 99)}
            # By round, in which candidates are asked in turn.
            line["rates"] = rates
            line["p50s_s"] = [float(np.median(latencies)) for latencies, _ in runs]
            print(json.dumps(line), flush=True)
    for context in stack:
        await context.aclose()


asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
