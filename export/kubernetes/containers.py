"""The containers of a pod: their commands, probes, resources and volumes."""

import math
import shlex
from collections.abc import Iterator
from typing import Any

from export.kubernetes.addresses import (
    GRPC_PORT,
    HOSTS_TLS,
    OPERATIONS_PORT,
    TLS,
    address_of,
    arguments,
    calls_to_hosts,
    hosts_client_secret,
    secret_of,
)
from export.kubernetes.fleet import Fleet, Member, Object, PodOptions
from serving.tables.memory_need import MemoryNeed

# Disk for the small files of a few versions (programs, manifests, settings), or for temporary files.
SMALL_BYTES = 256 << 20
# Lowest speed at which weights files are copied and compared with their digests, in bytes a second.
_READ_BYTES_S = 100 << 20
_START_S = 120


def resources(member: Member) -> dict[str, Any]:
    """The resources of a server: cores for each process and one for tritonserver; memory for tables and processes.

    The memory request covers all tables and processes, and the copies that deltas change. The limit also covers
    shared memory, and all processes twice, as there are while certificates are renewed. It is large enough to keep
    the tables in memory. There is no limit for cores: it would delay answers, and save nothing. Huge pages are a
    resource of their own, with equal request and limit. Tables in them do not count as memory.
    """
    weights_bytes = 0 if member.huge_bytes else member.live_bytes or member.weights_bytes
    need = MemoryNeed(
        weights_bytes=weights_bytes, instances=member.instances, shared_bytes=member.instance_shared_bytes
    )
    huge = {"hugepages-2Mi": mebibytes(member.huge_bytes)} if member.huge_bytes else {}
    return {
        "requests": {
            "cpu": str(member.instances * member.cores + 1),
            "memory": mebibytes(need.request_bytes),
            **huge,
        },
        "limits": {"memory": mebibytes(need.limit_bytes), **huge},
    }


def small_resources() -> dict[str, Any]:
    """The resources of a container that runs before the server."""
    return {"requests": {"cpu": "1", "memory": "256Mi"}, "limits": {"memory": "512Mi"}}


def shared_bytes(member: Member) -> int:
    """The size of /dev/shm, in bytes: for all processes twice, as `resources`."""
    return 2 * member.instance_shared_bytes * member.instances + member.live_bytes


def has_copy(options: PodOptions) -> bool:
    """Whether each pod has bundles of its own on the disk of its node."""
    return options.copy or options.store is not None


def copy_bytes(member: Member) -> int:
    """The disk space of a copy of the served bundles, in bytes."""
    return member.weights_bytes + SMALL_BYTES


def start_s(member: Member) -> float:
    """Longest time for a server to start, in seconds."""
    return _START_S + member.weights_bytes / _READ_BYTES_S


def mebibytes(size_bytes: int) -> str:
    """A number of bytes as a quantity of Kubernetes, such as "256Mi"."""
    return f"{math.ceil(size_bytes / (1 << 20))}Mi"


REPOSITORY, SOURCE, PRIVATE, DELTAS = "/repository", "/source", "/private", "/deltas"
# The folder for bundles from a store: a subfolder of the volume, so that drafts can be written beside it.
PULLED, REPOSITORY_OF_STORE = "/pulled", "models"
TRUSTED = "/keys/trusted.pem"
TMP_MOUNT = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108  in the pod
HOSTS_TLS_MOUNT = {"name": "hosts-tls", "mountPath": HOSTS_TLS, "readOnly": True}
_KEYS_MOUNT = {"name": "trusted-keys", "mountPath": "/keys", "readOnly": True}


def keys_name(fleet: Fleet) -> str:
    """The name of the ConfigMap with the trusted keys."""
    return f"{fleet.name}-trusted-keys"


def model_mount(volume: str, path: str, member: Member, folder: str = "") -> Object:
    """The mount of one model's folder of a repository, which is a folder of a volume. The pod has no other model."""
    return {"name": volume, "mountPath": path, "subPath": f"{folder}{member.model}", "readOnly": True}


def server_mounts(fleet: Fleet, member: Member, options: PodOptions) -> Iterator[Object]:
    """The mounts of the server's container."""
    folder = f"{REPOSITORY_OF_STORE}/" if options.store else ""
    yield model_mount("repository", f"{REPOSITORY}/{member.model}", member, folder)
    yield {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108  in the pod
    yield TMP_MOUNT
    if member.huge_bytes:
        yield {"name": "huge-pages", "mountPath": "/hugepages"}
    if member.live_bytes:
        yield {"name": "deltas", "mountPath": DELTAS, "readOnly": options.deltas_claim is not None}
    if not options.insecure:
        yield {"name": "tls", "mountPath": TLS, "readOnly": True}
        if calls_hosts(fleet, member):
            yield HOSTS_TLS_MOUNT
    if options.trusted_keys is not None:
        yield _KEYS_MOUNT
        yield {"name": "private", "mountPath": PRIVATE}


def volumes(fleet: Fleet, member: Member, options: PodOptions) -> Iterator[Object]:
    """The volumes of the pod."""
    claim = {"persistentVolumeClaim": {"claimName": options.claim, "readOnly": True}}
    if options.copy:
        yield {"name": "source", **claim}
    if has_copy(options):
        yield {"name": "repository", **_folder(copy_bytes(member))}
    else:
        yield {"name": "repository", **claim}
    shared = {"medium": "Memory", "sizeLimit": mebibytes(shared_bytes(member))}
    yield {"name": "shared-memory", "emptyDir": shared}
    yield {"name": "tmp", **_folder(SMALL_BYTES)}
    if member.huge_bytes:
        yield {"name": "huge-pages", "emptyDir": {"medium": "HugePages-2Mi"}}
    if member.live_bytes and options.deltas_claim is not None:
        yield {"name": "deltas", "persistentVolumeClaim": {"claimName": options.deltas_claim, "readOnly": True}}
    elif member.live_bytes:  # their size is unknown, and exceeding a limit would end the pod
        yield {"name": "deltas", "emptyDir": {}}
    if not options.insecure:
        yield {"name": "tls", **_secret(secret_of(fleet, member))}
        if calls_hosts(fleet, member):
            yield {"name": "hosts-tls", **_secret(hosts_client_secret(fleet))}
    if options.trusted_keys is not None:
        yield {"name": "trusted-keys", "configMap": {"name": keys_name(fleet)}}
        # With a copy of its own, a pod serves weights files in place: the private folder needs no second copy.
        yield {"name": "private", **_folder(SMALL_BYTES if has_copy(options) else copy_bytes(member))}


def calls_hosts(fleet: Fleet, member: Member) -> bool:
    """Whether a model is a router."""
    return member.host is None and bool(fleet.hosts)


def _folder(size_bytes: int) -> Object:
    """A folder on the disk of the node."""
    return {"emptyDir": {"sizeLimit": mebibytes(size_bytes)}}


def _secret(name: str) -> Object:
    return {"secret": {"secretName": name, "defaultMode": 0o440}}


_PROBE_S = 5
# Seconds for which a pod still answers after SIGTERM, while clients and endpoints drop it.
DRAIN_S = 20
_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def server(fleet: Fleet, member: Member, options: PodOptions) -> Object:
    """The server's container, which answers requests."""
    return {
        "name": "server",
        "image": options.image,
        "command": ["tbe-serve", "run", REPOSITORY],
        "args": list(_arguments(member, options)),
        # Deltas from a store are written there.
        "env": [{"name": "XDG_CACHE_HOME", "value": DELTAS}] if member.live_bytes and options.store else [],
        "ports": [
            {"name": "grpc", "containerPort": GRPC_PORT},
            {"name": "operations", "containerPort": OPERATIONS_PORT},
        ],
        "resources": resources(member),
        "securityContext": _SECURITY,
        "volumeMounts": list(server_mounts(fleet, member, options)),
        **_probes(member),
    }


def before_server(fleet: Fleet, member: Member, options: PodOptions) -> list[Object]:
    """The init containers, which run before the server, one after another."""
    copies = [_pull(member, options)] if options.store else [_copy(member, options)] if options.copy else []
    return [*copies, _wait_for_hosts(fleet, options)] if calls_hosts(fleet, member) else copies


def _arguments(member: Member, options: PodOptions) -> Iterator[str]:
    yield "--host=0.0.0.0"
    yield "--operations-host=0.0.0.0"  # for probes, and for the scrapers that the network policy allows
    yield f"--drain-s={DRAIN_S}"
    yield f"--shm-mib={member.instance_shared_bytes >> 20}"
    yield f"--serve={member.model}={','.join(map(str, member.versions))}"
    yield from ["--insecure"] if options.insecure else arguments(member)
    if member.live_bytes:
        yield f"--deltas={DELTAS if options.deltas_claim is not None else options.stored_deltas}"
    if options.trusted_keys is not None:
        yield from (f"--trusted-keys={TRUSTED}", f"--private-folder={PRIVATE}")
        if has_copy(options):  # no other pod can write to the copy
            yield "--trusted-weights=in-place"


def _probes(member: Member) -> Object:
    """The probes. Ready: the models are loaded and tritonserver answers. Alive: `tbe-serve run` works.

    `tbe-serve run` itself restarts crashed and hung processes. Neither probe calls hosts: a lost host must not
    restart routers, nor stop their answers that need no lost host.
    """
    ready = {"httpGet": {"path": "/readyz", "port": "operations"}, "timeoutSeconds": 5, "periodSeconds": _PROBE_S}
    return {
        "startupProbe": {**ready, "failureThreshold": math.ceil(start_s(member) / _PROBE_S)},
        "readinessProbe": {**ready, "failureThreshold": 2},
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": "operations"},
            "timeoutSeconds": 10,
            "periodSeconds": 15,
            "failureThreshold": 6,
        },
    }


def _copy(member: Member, options: PodOptions) -> Object:
    """The container that copies only a model's settings and served versions."""
    target = shlex.quote(f"{REPOSITORY}/{member.model}")
    versions = " ".join(f"{SOURCE}/{version}" for version in member.versions)
    script = (
        f"rm -rf {target}; mkdir {target}; find {SOURCE} -maxdepth 1 -type f -exec cp -t {target} {{}} +; "
        f"cp -rL -t {target} {versions}"
    )
    mounts = [model_mount("source", SOURCE, member), {"name": "repository", "mountPath": REPOSITORY}]
    return _before("copy", script, mounts, [], options)


def _pull(member: Member, options: PodOptions) -> Object:
    """The container that downloads only a model's settings and served versions from the store."""
    versions = f"--serve={member.model}={','.join(map(str, member.versions))}"
    command = ["tbe-serve", "pull", str(options.store), f"{PULLED}/{REPOSITORY_OF_STORE}", f"--model={member.model}"]
    mounts = [{"name": "repository", "mountPath": PULLED}, TMP_MOUNT]
    return _before("pull", shlex.join([*command, versions]), mounts, [], options)


def _wait_for_hosts(fleet: Fleet, options: PodOptions) -> Object:
    """The container that waits until every host answers, which loading a router needs, and prints which do not."""
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
