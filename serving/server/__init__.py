"""Run a tritonserver, switch the versions that it serves, and load models anew when they die."""

from serving.server.access import LOOPBACK, Access, ServerTls
from serving.server.models import ServedModel, find_models
from serving.server.ports import Ports
from serving.server.process import Server, run_server
from serving.server.supervisor import Supervisor
from serving.triton.control import Control

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
