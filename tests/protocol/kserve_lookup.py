"""A client of docs/protocol.md that shares no code with ours: KServe's own Python SDK, over gRPC or HTTP.

Usage: python kserve_lookup.py {grpc,rest} ADDRESS MODEL < request.json
    request.json is {"features": [...]?, "values": [...], "lengths": [...]}.
Prints {"shape": [1, B, D], "embeddings": [...]}.

Run with the packages of kserve.txt on PYTHONPATH.
"""

import asyncio
import importlib.util
import json
import sys
import types
from typing import Any

# Its package imports a model server and the API of Kubernetes, 450 MB in all; its clients alone are imported without.
_package: Any = types.ModuleType("kserve")
_package.__path__ = importlib.util.find_spec("kserve").submodule_search_locations  # type: ignore[union-attr]
sys.modules["kserve"] = _package

from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig  # noqa: E402
from kserve.protocol.infer_type import InferInput, InferRequest  # noqa: E402


def request(model: str, columns: dict[str, Any]) -> Any:
    inputs = [
        InferInput(name, [1, len(columns[name])], datatype, columns[name])
        for name, datatype in (("values", "INT64"), ("lengths", "INT32"))
    ]
    parameters = {"features": ",".join(columns["features"])} if "features" in columns else None
    return InferRequest(model_name=model, infer_inputs=inputs, parameters=parameters)


async def lookup(protocol: str, address: str, infer_request: Any) -> Any:
    if protocol == "grpc":
        return await InferenceGRPCClient(address, timeout=60).infer(infer_request)
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    return await client.infer(f"http://{address}", infer_request, model_name=infer_request.model_name)


if __name__ == "__main__":
    protocol, address, model = sys.argv[1:]
    (output,) = asyncio.run(lookup(protocol, address, request(model, json.load(sys.stdin)))).outputs
    print(json.dumps({"shape": list(output.shape), "embeddings": output.as_numpy().ravel().tolist()}))
