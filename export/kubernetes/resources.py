"""How much a pod needs: memory, cores and disk by the bytes of its weights, and the time to read them."""

import math
from typing import Any

from export.kubernetes.fleet import Member
from serving.machine_memory import MOST_OF_MEMORY

# What a process of a model takes beside its tables. tritonserver and `tbe-serve run` together take as much.
_PROCESS_BYTES = 512 << 20
# `tbe-serve run --shm-mib`: most for the requests and answers on their way to one process of a model.
_SHARED_BYTES = 1 << 30
# Programs, manifests and settings of a few versions; temporary files.
SMALL_BYTES = 256 << 20
# Weights are copied, and compared with their digests, at this speed at least, in bytes a second.
_READ_BYTES_S = 100 << 20
_START_S = 120


def resources(member: Member) -> dict[str, Any]:
    """Of a server: cores for each process and one for tritonserver; memory for tables and processes.

    The request has room for all tables. The limit also has room for requests and answers on their way, and is so
    large that tables are kept in memory. There is no limit to cores: it would make answers late, not cheap. Huge
    pages are a memory of their own, whose request and limit have to be equal: weights in them do not count as memory.
    """
    processes = _PROCESS_BYTES * (member.instances + 1)
    memory_bytes = processes if member.huge_bytes else member.weights_bytes + processes
    limit_bytes = memory_bytes + shared_bytes(member)
    if not member.huge_bytes:
        limit_bytes = max(limit_bytes, math.ceil(member.weights_bytes / MOST_OF_MEMORY))
    huge = {"hugepages-2Mi": mebibytes(member.huge_bytes)} if member.huge_bytes else {}
    return {
        "requests": {"cpu": str(member.instances * member.cores + 1), "memory": mebibytes(memory_bytes), **huge},
        "limits": {"memory": mebibytes(limit_bytes), **huge},
    }


def small_resources() -> dict[str, Any]:
    """Of what runs before a server."""
    return {"requests": {"cpu": "1", "memory": "256Mi"}, "limits": {"memory": "512Mi"}}


def shared_bytes(member: Member) -> int:
    """The size of /dev/shm."""
    return _SHARED_BYTES * member.instances


def copy_bytes(member: Member) -> int:
    """The disk that a copy of what is served takes."""
    return member.weights_bytes + SMALL_BYTES


def start_s(member: Member) -> float:
    """How long a server may take to start, in seconds."""
    return _START_S + member.weights_bytes / _READ_BYTES_S


def mebibytes(size_bytes: int) -> str:
    """A quantity of bytes, as Kubernetes writes it."""
    return f"{math.ceil(size_bytes / (1 << 20))}Mi"
