"""The containers of a pod: the server, and what runs before it."""

import math
import shlex
from collections.abc import Iterator

from export.kubernetes.addresses import GRPC_PORT, METRICS_PORT, address_of
from export.kubernetes.fleet import Fleet, Member
from export.kubernetes.labels import Object
from export.kubernetes.options import PodOptions
from export.kubernetes.resources import resources, small_resources, start_s
from export.kubernetes.tls import arguments, calls_to_hosts, calls_to_itself
from export.kubernetes.volumes import (
    HOSTS_TLS_MOUNT,
    PRIVATE,
    REPOSITORY,
    SOURCE,
    TMP_MOUNT,
    TRUSTED,
    calls_hosts,
    model_mount,
    server_mounts,
)

_PROBE_S = 5
# Clients and endpoints have this long to forget a pod before it is told to stop.
_FORGET_S = 5
_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def server(fleet: Fleet, member: Member, options: PodOptions) -> Object:
    """The container that answers."""
    environment = [] if options.insecure else calls_to_itself(fleet, member)
    return {
        "name": "server",
        "image": options.image,
        "command": ["tbe-serve", "run", REPOSITORY],
        "args": list(_arguments(member, options)),
        "env": environment,
        "ports": [
            {"name": "grpc", "containerPort": GRPC_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "resources": resources(member),
        "securityContext": _SECURITY,
        "volumeMounts": list(server_mounts(fleet, member, options)),
        **_probes(member),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_FORGET_S)]}}},
    }


def before_server(fleet: Fleet, member: Member, options: PodOptions) -> list[Object]:
    """The containers that run before it, one after the other."""
    copies = [_copy(member, options)] if options.copy else []
    return [*copies, _wait_for_hosts(fleet, options)] if calls_hosts(fleet, member) else copies


def _arguments(member: Member, options: PodOptions) -> Iterator[str]:
    yield "--host=0.0.0.0"
    yield "--metrics-host=0.0.0.0"  # of scrapers, which the network policy names, and of the liveness probe
    yield f"--serve={member.model}={','.join(map(str, member.versions))}"
    yield from ["--insecure"] if options.insecure else arguments(member)
    if options.trusted_keys is not None:
        yield from (f"--trusted-keys={TRUSTED}", f"--private-folder={PRIVATE}")
        if options.copy:  # nobody else can write to it
            yield "--trusted-weights=in-place"


def _probes(member: Member) -> Object:
    """Ready: a row of every table is answered, by a router's hosts too. Alive: tritonserver itself answers.

    `tbe-serve run` starts anew what died or hangs. The liveness probe is for what it does not notice. It looks
    nothing up: a host that is lost must not restart routers.
    """
    lookup = {"exec": {"command": ["tbe-serve", "health", member.model, "--timeout-s", "2"]}, "timeoutSeconds": 5}
    return {
        "startupProbe": {
            **lookup,
            "periodSeconds": _PROBE_S,
            "failureThreshold": math.ceil(start_s(member) / _PROBE_S),
        },
        "readinessProbe": {**lookup, "periodSeconds": _PROBE_S, "failureThreshold": 2},
        "livenessProbe": {
            "httpGet": {"path": "/metrics", "port": "metrics"},
            "timeoutSeconds": 10,
            "periodSeconds": 15,
            "failureThreshold": 6,
        },
    }


def _copy(member: Member, options: PodOptions) -> Object:
    """Copies the settings of a model and the versions that are served, and nothing else."""
    target = shlex.quote(f"{REPOSITORY}/{member.model}")
    versions = " ".join(f"{SOURCE}/{version}" for version in member.versions)
    script = (
        f"rm -rf {target}; mkdir {target}; find {SOURCE} -maxdepth 1 -type f -exec cp -t {target} {{}} +; "
        f"cp -rL -t {target} {versions}"
    )
    mounts = [model_mount("source", SOURCE, member), {"name": "repository", "mountPath": REPOSITORY}]
    return _before("copy", script, mounts, [], options)


def _wait_for_hosts(fleet: Fleet, options: PodOptions) -> Object:
    """Waits until every host answers, and says which does not. A router is only loaded then."""
    script = "\n".join(
        f"until tbe-serve health {shlex.quote(host.model)} --url {address_of(host.name)} --timeout-s 2; "
        "do sleep 2; done"
        for host in fleet.hosts
    )
    if options.insecure:
        return _before("wait-for-hosts", script, [TMP_MOUNT], [], options)
    return _before("wait-for-hosts", script, [TMP_MOUNT, HOSTS_TLS_MOUNT], calls_to_hosts(fleet), options)


def _before(name: str, script: str, mounts: list[Object], environment: list[Object], options: PodOptions) -> Object:
    return {
        "name": name,
        "image": options.image,
        "command": ["sh", "-ec", script],
        "env": environment,
        "resources": small_resources(),
        "securityContext": _SECURITY,
        "volumeMounts": mounts,
    }
