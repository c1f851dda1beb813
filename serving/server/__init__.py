"""Run a tritonserver, switch the versions that it serves, and load models again when their processes die."""

from serving.model.config_file import find_models
from serving.server.access import LOOPBACK, Access
from serving.server.local_hosts import LocalFleet, run_local_hosts
from serving.server.ports import Ports
from serving.server.run import run_server
from serving.server.running_server import ServedModel, Server
from serving.server.supervise import Supervisor
from serving.server.tls import ServerTls
from serving.triton.control import Control

__all__ = [
    "LOOPBACK",
    "Access",
    "Control",
    "LocalFleet",
    "Ports",
    "ServedModel",
    "Server",
    "ServerTls",
    "Supervisor",
    "find_models",
    "run_local_hosts",
    "run_server",
]
