"""The fleet that serves a bundle: one model, or a router and the hosts of its plan."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export.kubernetes.names import check_names, host_name, kubernetes_name
from serving.bundle.lineage import deltas_url
from serving.bundle.load import Bundle, open_bundle, open_host
from serving.bundle.manifest import MANIFEST
from serving.bundle.signature import TrustedKeys
from serving.errors import BundleError, ConfigurationError
from serving.files import is_url
from serving.model.config_file import read_config, settings_of
from serving.model.settings import WeightsMemory
from serving.tables.memory_need import SHM_BYTES, shared_bytes_of
from serving.tables.pages import HUGE_PAGE, in_huge_pages

METRICS_FROM = "monitoring"
# By digest, such as registry.example/team/tbe-serving@sha256:…, with a tag or without.
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]*@sha256:[0-9a-f]{64}")
# Namespaces are named by DNS labels, claims by labels joined by dots.
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


@dataclass(frozen=True, kw_only=True, slots=True)
class PodOptions:
    """Options that all pods of a fleet share.

    Attributes:
        image: of the server, by digest.
        claim: the PersistentVolumeClaim with the repository. Either this or `store` is set.
        store: the URL of the repository in a store, from which each pod downloads its bundles to its node's disk.
        copy: whether each pod copies its bundles from the claim to its node's disk.
        trusted_keys: a file of public keys. One of them must have signed the bundles. None: no signature is needed.
        insecure: whether TLS is off.
        metrics_from: the namespace whose pods may read metrics.
        deltas_claim: the PersistentVolumeClaim with the deltas of live models. None: no model takes deltas, or they
            are in the store.

    Raises:
        ConfigurationError: a name is invalid in Kubernetes, or an image has no digest.
    """

    image: str
    claim: str | None = None
    store: str | None = None
    copy: bool = False
    trusted_keys: Path | None = None
    insecure: bool = False
    metrics_from: str = METRICS_FROM
    deltas_claim: str | None = None

    def __post_init__(self) -> None:
        if (self.claim is None) == (self.store is None):
            raise ConfigurationError("--claim, --store: expected one of them: where pods have the repository from")
        if self.store is not None and (self.copy or not is_url(self.store)):
            raise ConfigurationError(f"--store: expected s3://… or gs://…, without --copy, got {self.store!r}")
        if not _IMAGE.fullmatch(self.image):
            by_digest = "by digest, such as registry.example/tbe-serving@sha256:…, for a tag can be moved"
            raise ConfigurationError(f"--image: expected an image {by_digest}, got {self.image!r}")
        for option, claim in (("--claim", self.claim), ("--deltas-claim", self.deltas_claim)):
            if claim is not None and not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", claim):
                raise ConfigurationError(f"{option}: expected the name of a PersistentVolumeClaim, got {claim!r}")
        if not re.fullmatch(_LABEL, self.metrics_from):
            raise ConfigurationError(f"--metrics-from: expected the name of a namespace, got {self.metrics_from!r}")

    @property
    def stored_deltas(self) -> str:
        """The URL of the deltas of a repository in a store."""
        return deltas_url(str(self.store))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Numbers of pods.

    Attributes:
        routers: the minimum number of pods of the model that clients call.
        most_routers: the maximum number of pods of that model.
        of_hosts: the number of pods of each host.
        of_host: the number of pods of single hosts, by the host's number. They override `of_hosts`.
        queue_ms: the mean time in ms that requests may wait before the autoscaler adds pods of the model that clients
            call. None: it scales by CPU alone. A router waits more than it computes.

    Raises:
        ConfigurationError: a number is not above 0, or `most_routers` is below `routers`.
    """

    routers: int = 2
    most_routers: int = 8
    of_hosts: int = 2
    of_host: Mapping[int, int] = field(default_factory=dict)
    queue_ms: int | None = None

    def __post_init__(self) -> None:
        numbers = {"--routers": self.routers, "--replicas": self.of_hosts}
        numbers |= {f"--replicas-of {host}": number for host, number in self.of_host.items()}
        numbers |= {} if self.queue_ms is None else {"--scale-on-queue-ms": self.queue_ms}
        for option, number in numbers.items():
            if number < 1:
                raise ConfigurationError(f"{option}: expected at least 1, got {number}")
        if self.most_routers < self.routers:
            raise ConfigurationError(
                f"--most-routers: expected at least --routers, {self.routers}, got {self.most_routers}"
            )


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


def read_fleet(
    path: Path,
    replicas: Replicas,
    *,
    name: str | None = None,
    hosts_also: int | None = None,
    trusted: TrustedKeys | None = None,
) -> Fleet:
    """The fleet of a bundle. The bundles of its hosts are in the same repository.

    Args:
        path: the bundle, <repository>/<model>/<version>.
        replicas: numbers of pods.
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
    host_bundles = _bundles_of_hosts(routers, trusted)
    hosts = tuple(
        Member(
            name=host_name(name, host),
            model=bundles[0].path.parent.name,
            host=host,
            versions=tuple(sorted({int(bundle.path.name) for bundle in bundles}, reverse=True)),
            weights_bytes=sum(map(_weights_bytes, bundles)),
            **_settings(bundles, trusted),
            replicas=replicas.of_host.get(host, replicas.of_hosts),
        )
        for host, bundles in host_bundles.items()
    )
    if unknown := sorted(replicas.of_host.keys() - host_bundles.keys()):
        raise ConfigurationError(f"--replicas-of: expected hosts of the plan, {[*host_bundles]}, got {unknown[0]}")
    front = Member(
        name=name,
        model=model,
        versions=(version,),
        weights_bytes=_weights_bytes(bundle),
        **_settings([bundle], trusted),
        replicas=replicas.routers,
    )
    models = {manifest_path.parent.parent.name for manifest_path in repository.glob(f"*/*/{MANIFEST}")}
    check_names([front.name, *(host.name for host in hosts)], models - {model, *(host.model for host in hosts)})
    return Fleet(bundle=bundle, front=front, hosts=hosts)


def check_deltas(fleet: Fleet, options: PodOptions) -> None:
    """Refuse a claim of deltas if no model takes them, and a model that takes deltas without a claim or a store.

    Raises:
        ConfigurationError: with the name of the model.
    """
    live = [member.model for member in (fleet.front, *fleet.hosts) if member.live_bytes]
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


def _bundles_of_hosts(routers: Sequence[Bundle], trusted: TrustedKeys | None) -> dict[int, list[Bundle]]:
    """The bundles of each host, one for each router's bundle."""
    by_host: dict[int, list[Bundle]] = {}
    for router in routers:
        for host in router.manifest.hosts:
            by_host.setdefault(host.host, []).append(open_host(router, host, trusted))
    return by_host


def _weights_bytes(bundle: Bundle) -> int:
    return sum(bundle.manifest.files[name].size_bytes for name in bundle.manifest.mapped_files)


def _settings(bundles: Sequence[Bundle], trusted: TrustedKeys | None) -> dict[str, int]:
    """The attributes of a Member that follow from the model's settings.

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
    files = [bundle.manifest.files[name] for bundle in bundles for name in bundle.manifest.weights_files]
    copied = sum(in_huge_pages(file.size_bytes) for file in files)
    huge = copied if settings.weights_memory == WeightsMemory.HUGE else 0
    live = copied + HUGE_PAGE * len(bundles) if settings.weights_memory == WeightsMemory.LIVE else 0
    scores = any(bundle.manifest.dense_part for bundle in bundles)
    cores = max(settings.threads, settings.score_threads or 1) if scores else settings.threads
    return {
        "instances": settings.instances,
        "cores": cores,
        "instance_shared_bytes": max(shared_bytes_of(bundle.manifest, settings) for bundle in bundles),
        "huge_bytes": huge,
        "live_bytes": live,
    }


# An object of Kubernetes, or a part of one.
Object = dict[str, Any]


def labels_of(fleet: Fleet, member: Member) -> dict[str, str]:
    """The labels that select the pods of a model."""
    if member.host is not None:
        return hosts_labels(fleet) | {"tbe-serving/host": str(member.host)}
    return _fleet_labels(fleet) | {"app.kubernetes.io/component": "router" if fleet.hosts else "lookup"}


def hosts_labels(fleet: Fleet) -> dict[str, str]:
    """The labels that select the pods of all hosts."""
    return _fleet_labels(fleet) | {"app.kubernetes.io/component": "host"}


def client_labels(fleet: Fleet) -> dict[str, str]:
    """The labels of pods that may call the fleet."""
    return {f"{fleet.name}-client": "true"}


def _fleet_labels(fleet: Fleet) -> dict[str, str]:
    return {"app.kubernetes.io/name": "tbe-serving", "app.kubernetes.io/instance": fleet.name}
