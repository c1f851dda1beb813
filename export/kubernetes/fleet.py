"""The fleet that serves a bundle: one model, or a router and the hosts of its plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from export.kubernetes.names import check_names, kubernetes_name
from export.kubernetes.options import ManifestOptions
from serving.bundle.load import Bundle, open_bundle, open_host
from serving.bundle.manifest import MANIFEST
from serving.bundle.signature import TrustedKeys
from serving.errors import BundleError, ConfigurationError
from serving.model.config_file import read_config, settings_of
from serving.model.settings import WeightsMemory
from serving.tables.memory_need import SHM_BYTES, MemoryNeed, shared_bytes_of
from serving.tables.pages import HUGE_PAGE, in_huge_pages

GRPC_PORT = 8001
# Disk for the small files of a few versions: programs, manifests, settings.
_SMALL_BYTES = 256 << 20
# Lowest speed at which weights files are copied and compared with their digests, in bytes a second.
_READ_BYTES_S = 100 << 20
_START_S = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """The pods of one model.

    Attributes:
        name: the name of its Kubernetes objects.
        model: the name of the model.
        host: the number of the host in the plan. None: clients call the model.
        versions: the served versions, the newest first.
        weights_bytes: the size of the weights files and id maps of all these versions.
        instances: the number of processes that answer requests.
        cores: the number of cores that each process can use.
        replicas: the number of pods, or the minimum for an autoscaler.
        instance_shared_bytes: the maximum shared memory of each process, a whole number of MiB.
        huge_bytes: the size of the weights files on a file system of huge pages. 0: they are not served from one.
        live_bytes: the size of the copies in /dev/shm that deltas change. 0: the model takes no deltas.
    """

    name: str
    model: str
    host: int | None = None
    versions: tuple[int, ...]
    weights_bytes: int
    instances: int
    cores: int
    replicas: int
    instance_shared_bytes: int = SHM_BYTES
    huge_bytes: int = 0
    live_bytes: int = 0

    @property
    def address(self) -> str:
        """The address of all replicas: a headless Service has a DNS record for each of them."""
        return f"dns:///{self.name}:{GRPC_PORT}"

    @property
    def requested_cores(self) -> int:
        """The cores of all processes, and one for tritonserver."""
        return self.instances * self.cores + 1

    @property
    def memory(self) -> MemoryNeed:
        """The memory of a pod: of tables, or the copies that deltas change, and of processes."""
        return MemoryNeed(
            weights_bytes=0 if self.huge_bytes else self.live_bytes or self.weights_bytes,
            instances=self.instances,
            shared_bytes=self.instance_shared_bytes,
        )

    @property
    def shm_bytes(self) -> int:
        """The size of /dev/shm: for all processes twice, as there are while certificates are renewed."""
        return 2 * self.instance_shared_bytes * self.instances + self.live_bytes

    @property
    def copy_bytes(self) -> int:
        """The disk space of a copy of the served versions."""
        return self.weights_bytes + _SMALL_BYTES

    @property
    def start_s(self) -> float:
        """The longest time for a server to start, in seconds."""
        return _START_S + self.weights_bytes / _READ_BYTES_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """All models that are deployed for a bundle.

    Attributes:
        bundle: the bundle of the model that clients call.
        front: the model that clients call: a router, or the only model.
        hosts: the hosts of the router's plan, or () if the bundle is not a router's.
    """

    bundle: Bundle
    front: Member
    hosts: tuple[Member, ...]

    @property
    def name(self) -> str:
        """The name of the objects that clients call."""
        return self.front.name

    @property
    def hosts_server_name(self) -> str:
        """The name in the certificates of all hosts."""
        return f"{self.name}-hosts"

    @property
    def members(self) -> tuple[Member, ...]:
        """All models."""
        return (self.front, *self.hosts)


def read_fleet(
    path: Path,
    options: ManifestOptions,
    *,
    name: str | None = None,
    hosts_also: int | None = None,
    trusted: TrustedKeys | None = None,
) -> Fleet:
    """The fleet of a bundle. The bundles of its hosts are in the same repository.

    Args:
        path: the bundle, <repository>/<model>/<version>.
        options: the numbers of pods.
        name: the name of the Kubernetes objects. None: derived from the model's name.
        hosts_also: another version of the router, whose rows the hosts serve as well.
        trusted: one of these keys must have signed bundles and settings. None: no signature is needed.

    Raises:
        BundleError: a bundle is missing, damaged, not signed, a host's own, or not the one that the router names.
        ConfigurationError: a name is invalid in Kubernetes, or also another model's; a number is for an unknown host;
            or a setting does not work in a pod.
    """
    bundle = open_bundle(path.absolute(), trusted)
    model, version, repository = bundle.path.parent.name, int(bundle.path.name), bundle.path.parent.parent
    if part := bundle.manifest.part_of:
        raise BundleError(f"{path}: expected a router's bundle, got that of its host {part.host}: give {part.model}")
    name = kubernetes_name(model, name)
    if hosts_also is not None and not bundle.manifest.hosts:
        raise ConfigurationError(f"--hosts-also: expected a router, got {path}, which has no hosts")
    routers = [bundle]
    if hosts_also is not None and hosts_also != version:
        routers.append(_router_of_version(bundle, hosts_also, trusted))
    host_bundles: dict[int, list[Bundle]] = {}
    for router in routers:
        for host in router.manifest.hosts:
            host_bundles.setdefault(host.host, []).append(open_host(router, host, trusted))
    hosts = tuple(
        _member(f"{name}-host-{host}", bundles, options.replicas_of.get(host, options.replicas), trusted, host)
        for host, bundles in host_bundles.items()
    )
    if unknown := sorted(options.replicas_of.keys() - host_bundles.keys()):
        raise ConfigurationError(f"--replicas-of: expected hosts of the plan, {[*host_bundles]}, got {unknown[0]}")
    front = _member(name, [bundle], options.routers, trusted)
    models = {manifest_path.parent.parent.name for manifest_path in repository.glob(f"*/*/{MANIFEST}")}
    fleet = Fleet(bundle=bundle, front=front, hosts=hosts)
    others = sorted(models - {member.model for member in fleet.members})
    check_names([member.name for member in fleet.members], others)
    return fleet


def check_deltas(fleet: Fleet, options: ManifestOptions) -> None:
    """Refuse a claim of deltas if no model takes them, and a model that takes deltas without a claim or a store.

    Raises:
        ConfigurationError: with the name of the model.
    """
    live = [member.model for member in fleet.members if member.live_bytes]
    if live and options.deltas_claim is None and options.store is None:
        raise ConfigurationError(
            f"{live[0]}: weights-memory: is 'live': say where its deltas are, --deltas-claim; or `tbe-serve "
            "configure --weights-memory mapped`"
        )
    if not live and options.deltas_claim is not None:
        raise ConfigurationError(
            f"--deltas-claim: expected a model that takes deltas: `tbe-serve configure {fleet.bundle.path.parent} "
            "--weights-memory live`"
        )


def _router_of_version(router: Bundle, version: int, trusted: TrustedKeys | None) -> Bundle:
    """Another version of a router, with the same hosts."""
    other = open_bundle(router.path.parent / str(version), trusted)
    expected, got = ([(host.host, host.model) for host in one.manifest.hosts] for one in (router, other))
    if got != expected:
        raise BundleError(
            f"{other.path}: expected the hosts of version {router.path.name}, {expected}, got {got}: publish "
            "versions of other hosts as another model"
        )
    return other


def _member(
    name: str, bundles: Sequence[Bundle], replicas: int, trusted: TrustedKeys | None, host: int | None = None
) -> Member:
    """The pods of a model that serves `bundles`.

    Raises:
        ConfigurationError: a setting does not work in a pod.
    """
    model = bundles[0].path.parent
    settings = settings_of(read_config(model, trusted))
    if settings.weights_memory == WeightsMemory.LOCKED:
        raise ConfigurationError(
            f"{model}: weights-memory: expected 'mapped', 'huge' or 'live' in pods, got 'locked': how much memory a "
            f"pod may lock, its node says: `tbe-serve configure {model} --weights-memory mapped`. A pod's limit has "
            "room for its tables"
        )
    manifests = [bundle.manifest for bundle in bundles]
    mapped = [manifest.files[name].size_bytes for manifest in manifests for name in manifest.mapped_files]
    weights = [manifest.files[name].size_bytes for manifest in manifests for name in manifest.weights_files]
    copied_bytes = sum(map(in_huge_pages, weights))
    has_scores = any(manifest.dense_part for manifest in manifests)
    return Member(
        name=name,
        model=model.name,
        host=host,
        versions=tuple(sorted({int(bundle.path.name) for bundle in bundles}, reverse=True)),
        weights_bytes=sum(mapped),
        instances=settings.instances,
        cores=max(settings.threads, (settings.score_threads or 1) if has_scores else 1),
        replicas=replicas,
        instance_shared_bytes=max(shared_bytes_of(manifest, settings) for manifest in manifests),
        huge_bytes=copied_bytes if settings.weights_memory == WeightsMemory.HUGE else 0,
        live_bytes=copied_bytes + HUGE_PAGE * len(bundles) if settings.weights_memory == WeightsMemory.LIVE else 0,
    )
