"""The volumes of a pod, and where they are mounted."""

from collections.abc import Iterator

from export.kubernetes.fleet import Fleet, Member
from export.kubernetes.labels import Object
from export.kubernetes.options import PodOptions
from export.kubernetes.resources import SMALL_BYTES, copy_bytes, mebibytes, shared_bytes
from export.kubernetes.tls import HOSTS_TLS, TLS, hosts_client_secret, secret_of

REPOSITORY, SOURCE, PRIVATE = "/repository", "/source", "/private"
TRUSTED = "/keys/trusted.pem"
TMP_MOUNT = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108  in the pod
HOSTS_TLS_MOUNT = {"name": "hosts-tls", "mountPath": HOSTS_TLS, "readOnly": True}
_KEYS_MOUNT = {"name": "trusted-keys", "mountPath": "/keys", "readOnly": True}


def keys_name(fleet: Fleet) -> str:
    """The name of the ConfigMap with the trusted keys."""
    return f"{fleet.name}-trusted-keys"


def model_mount(volume: str, path: str, member: Member) -> Object:
    """The folder of one model of a repository. The pod sees no other."""
    return {"name": volume, "mountPath": path, "subPath": member.model, "readOnly": True}


def server_mounts(fleet: Fleet, member: Member, options: PodOptions) -> Iterator[Object]:
    """What the server's container has mounted."""
    yield model_mount("repository", f"{REPOSITORY}/{member.model}", member)
    yield {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108  in the pod
    yield TMP_MOUNT
    if member.huge_bytes:
        yield {"name": "huge-pages", "mountPath": "/hugepages"}
    if not options.insecure:
        yield {"name": "tls", "mountPath": TLS, "readOnly": True}
        if calls_hosts(fleet, member):
            yield HOSTS_TLS_MOUNT
    if options.trusted_keys is not None:
        yield _KEYS_MOUNT
        yield {"name": "private", "mountPath": PRIVATE}


def volumes(fleet: Fleet, member: Member, options: PodOptions) -> Iterator[Object]:
    """What the pod has."""
    claim = {"persistentVolumeClaim": {"claimName": options.claim, "readOnly": True}}
    if options.copy:
        yield {"name": "source", **claim}
        yield {"name": "repository", **_folder(copy_bytes(member))}
    else:
        yield {"name": "repository", **claim}
    shared = {"medium": "Memory", "sizeLimit": mebibytes(shared_bytes(member))}
    yield {"name": "shared-memory", "emptyDir": shared}
    yield {"name": "tmp", **_folder(SMALL_BYTES)}
    if member.huge_bytes:
        yield {"name": "huge-pages", "emptyDir": {"medium": "HugePages-2Mi"}}
    if not options.insecure:
        yield {"name": "tls", **_secret(secret_of(fleet, member))}
        if calls_hosts(fleet, member):
            yield {"name": "hosts-tls", **_secret(hosts_client_secret(fleet))}
    if options.trusted_keys is not None:
        yield {"name": "trusted-keys", "configMap": {"name": keys_name(fleet)}}
        # With a copy of its own, a pod serves weights where they are.
        yield {"name": "private", **_folder(SMALL_BYTES if options.copy else copy_bytes(member))}


def calls_hosts(fleet: Fleet, member: Member) -> bool:
    """Whether a model is a router."""
    return member.host is None and bool(fleet.hosts)


def _folder(size_bytes: int) -> Object:
    """A folder on the disk of the node."""
    return {"emptyDir": {"sizeLimit": mebibytes(size_bytes)}}


def _secret(name: str) -> Object:
    return {"secret": {"secretName": name, "defaultMode": 0o440}}
