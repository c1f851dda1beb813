"""Triton's protocol in a pool of its own: what it is made of, and beside other libraries that define the same names."""

import subprocess
import sys

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from tritonclient.grpc import model_config_pb2, service_pb2

from serving.protocol import messages

# What KServe's SDK and MLServer do at import: a file of theirs in protobuf's default pool, with names that Triton's
# grpc_service.proto has, too. (grpc_predict_v2.proto of kserve 0.21, dataplane.proto of mlserver 1.7.)
_OTHER = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

file = descriptor_pb2.FileDescriptorProto(name="{file}", package="inference", syntax="proto3")
for name in ("ServerLiveRequest", "ModelInferRequest", "ModelInferResponse"):
    file.message_type.add(name=name).field.add(name="model_name", number=1, type=9, label=1)
pool = descriptor_pool.Default()
pool.AddSerializedFile(file.SerializeToString())
Theirs = message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelInferRequest"))
"""
_OURS = "from serving.client import LookupClient; from serving.model.config_file import model_config\n"
_BOTH = """
from serving.protocol.messages import ModelInferRequest as Ours
assert Theirs.FromString(Ours(model_name="m").SerializeToString()) == Theirs(model_name="m")
assert Ours.FromString(Theirs(model_name="m").SerializeToString()) == Ours(model_name="m")
"""


@pytest.mark.parametrize("file", ["grpc_predict_v2.proto", "dataplane.proto", "grpc_service.proto"])
@pytest.mark.parametrize("is_ours_first", [True, False], ids=["ours first", "theirs first"])
def test_another_library_may_define_the_same_names(file: str, is_ours_first: bool) -> None:
    other_code = _OTHER.format(file=file)
    code = (_OURS + other_code if is_ours_first else other_code + _OURS) + _BOTH
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


def test_importing_serving_defines_nothing_in_the_default_pool() -> None:
    code = f"""
from google.protobuf import descriptor_pool
{_OURS}
try:
    descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")
except KeyError:
    pass
else:
    raise AssertionError
import sys
assert not [name for name in sys.modules if name.startswith("tritonclient")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_descriptors_are_those_of_the_pinned_tritonclient() -> None:
    """If it was raised: write these bytes to serving/protocol/descriptors.binpb."""
    expected = FileDescriptorSet()
    for module in (model_config_pb2, service_pb2):
        expected.file.add().ParseFromString(module.DESCRIPTOR.serialized_pb)
    with open(f"{messages.__file__.rpartition('/')[0]}/{messages.DESCRIPTORS}", "rb") as file:
        assert file.read() == expected.SerializeToString()
