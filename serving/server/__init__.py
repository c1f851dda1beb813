"""A tritonserver of our own: find it, run it, switch its versions, and notice when one of its models died."""

from serving.server.access import LOOPBACK, Access, ServerTls
from serving.server.control import Control
from serving.server.ports import Ports
from serving.server.process import ServedModel, Server, find_models, run_server
from serving.server.supervisor import Supervisor

__all__ = [
    "LOOPBACK",
    "Access",
    "Control",
    "Ports",
    "ServedModel",
    "Server",
    "ServerTls",
    "Supervisor",
    "find_models",
    "run_server",
]
