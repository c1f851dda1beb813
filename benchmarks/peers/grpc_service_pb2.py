"""KServe's messages under the name that they say they come from: Ray pickles them by it."""

from tritonclient.grpc.service_pb2 import *  # noqa: F403
