"""The objects of a model: a Deployment for the model that clients call, a StatefulSet for each host, and the rest."""

from importlib.resources import files

import yaml

from export.kubernetes.addresses import GRPC_PORT, OPERATIONS_PORT
from export.kubernetes.containers import DRAIN_S, before_server, server, volumes
from export.kubernetes.fleet import (
    Fleet,
    Member,
    Object,
    PodOptions,
    Replicas,
    client_labels,
    hosts_labels,
    labels_of,
)


def pod_monitor(fleet: Fleet) -> Object:
    """The PodMonitor of all pods. Each series has labels for the part of the fleet and the host."""
    instance = {"app.kubernetes.io/name": "tbe-serving", "app.kubernetes.io/instance": fleet.name}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": fleet.name, "labels": instance},
        "spec": {
            "selector": {"matchLabels": instance},
            "podTargetLabels": ["app.kubernetes.io/component", "tbe-serving/host"],
            "podMetricsEndpoints": [{"port": "operations", "path": "/metrics", "interval": "15s"}],
        },
    }


def prometheus_rule() -> Object:
    """The PrometheusRule of every model that is served: the recording rules and alerts of alerts.yaml."""
    rules = yaml.safe_load(files(__package__).joinpath("alerts.yaml").read_text())
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tbe-serving", "labels": {"app.kubernetes.io/name": "tbe-serving"}},
        "spec": rules,
    }


_DNS = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
_HTTPS_PORT = 443


def _network_policy(fleet: Fleet, member: Member, options: PodOptions) -> Object:
    """Routers call hosts, and DNS to find them. Hosts are called only by routers, and call nothing."""
    is_front = member.host is None
    callers = client_labels(fleet) if is_front else labels_of(fleet, fleet.front)
    reached: list[Object] = []
    if is_front and fleet.hosts:
        reached.append({"to": [_pods(hosts_labels(fleet))], "ports": _tcp(GRPC_PORT)})
    if options.store:  # the addresses of a store are unknown
        reached.append({"ports": _tcp(_HTTPS_PORT)})
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": options.metrics_from}}}
    spec = {
        "podSelector": {"matchLabels": labels_of(fleet, member)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [_pods(callers)], "ports": _tcp(GRPC_PORT)},
            {"from": [monitoring], "ports": _tcp(OPERATIONS_PORT)},
        ],
        "egress": [*reached, _DNS] if reached else [],
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", fleet, member, spec)


def _tcp(port: int) -> list[Object]:
    """A TCP port by number: not every network plugin knows the names of other pods' ports."""
    return [{"protocol": "TCP", "port": port}]


def _pods(labels: dict[str, str]) -> Object:
    return {"podSelector": {"matchLabels": labels}}


# Seconds to stop a pod: it drains, and then answers the requests that it accepted.
_GRACE_S = DRAIN_S + 40
_USER = 1000


def pod_template(fleet: Fleet, member: Member, options: PodOptions) -> Object:
    """The template of a model's pods, for a Deployment or a StatefulSet."""
    spec = {
        "terminationGracePeriodSeconds": _GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {"podAntiAffinity": _anti_affinity(fleet, member)},
        "topologySpreadConstraints": [_over_zones(fleet, member)],
        "initContainers": before_server(fleet, member, options),
        "containers": [server(fleet, member, options)],
        "volumes": list(volumes(fleet, member, options)),
    }
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(OPERATIONS_PORT)}
    return {"metadata": {"labels": labels_of(fleet, member), "annotations": annotations}, "spec": spec}


def _anti_affinity(fleet: Fleet, member: Member) -> Object:
    """Anti-affinity. Replicas of a host must be on different nodes: a lost node takes only one. Others should be."""
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels_of(fleet, member)}}
    if member.host is not None:
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}


def _over_zones(fleet: Fleet, member: Member) -> Object:
    return {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels_of(fleet, member)},
    }


# The autoscaler's target: cores in use, in percent of requested cores.
_CPU_PERCENT = 60
# What the rule of deploy/kubernetes/prometheus-adapter.yaml calls the time that requests wait for a pod, in ms.
_QUEUE_METRIC = "lookup_queue_milliseconds"
# Seconds that a new pod must be ready, and so in DNS, before the next one is replaced.
_SETTLED_S = 10


def front_manifests(fleet: Fleet, replicas: Replicas, options: PodOptions) -> list[Object]:
    """All objects of the model that clients call."""
    front = fleet.front
    return [
        _deployment(fleet, front, options),
        _service(fleet, front),
        _disruption_budget(fleet, front),
        _autoscaler(fleet, front, replicas),
        _network_policy(fleet, front, options),
    ]


def host_manifests(fleet: Fleet, host: Member, options: PodOptions) -> list[Object]:
    """All objects of a host."""
    return [
        _stateful_set(fleet, host, options),
        _service(fleet, host),
        _disruption_budget(fleet, host),
        _network_policy(fleet, host, options),
    ]


def _deployment(fleet: Fleet, member: Member, options: PodOptions) -> Object:
    """A Deployment without a number of replicas: the autoscaler sets it, and each `kubectl apply` would reset it."""
    spec = {
        "selector": {"matchLabels": labels_of(fleet, member)},
        "minReadySeconds": _SETTLED_S,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": pod_template(fleet, member, options),
    }
    deployment = _object("apps/v1", "Deployment", fleet, member, spec)
    deployment["metadata"]["annotations"] = {
        "tbe-serving/bundle": f"{fleet.front.model}/{fleet.bundle.path.name}",
        "tbe-serving/manifest": f"sha256:{fleet.bundle.digest}",
    }
    return deployment


def _stateful_set(fleet: Fleet, member: Member, options: PodOptions) -> Object:
    spec = {
        "replicas": member.replicas,
        "serviceName": member.name,
        "selector": {"matchLabels": labels_of(fleet, member)},
        "podManagementPolicy": "Parallel",
        "minReadySeconds": _SETTLED_S,
        "updateStrategy": {"type": "RollingUpdate"},
        "template": pod_template(fleet, member, options),
    }
    return _object("apps/v1", "StatefulSet", fleet, member, spec)


def _service(fleet: Fleet, member: Member) -> Object:
    """A headless Service: clients and routers get the address of every ready pod, and call them in turn."""
    spec = {
        "clusterIP": "None",
        "selector": labels_of(fleet, member),
        "ports": [
            {"name": "grpc", "port": GRPC_PORT, "targetPort": "grpc", "appProtocol": "grpc"},
            {"name": "operations", "port": OPERATIONS_PORT, "targetPort": "operations"},
        ],
    }
    return _object("v1", "Service", fleet, member, spec)


def _disruption_budget(fleet: Fleet, member: Member) -> Object:
    spec = {
        "maxUnavailable": 1,
        # A pod that is not ready answers no request: it must not keep a node from being drained.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": labels_of(fleet, member)},
    }
    return _object("policy/v1", "PodDisruptionBudget", fleet, member, spec)


def _autoscaler(fleet: Fleet, member: Member, replicas: Replicas) -> Object:
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": _CPU_PERCENT}}
    metrics: list[Object] = [{"type": "Resource", "resource": cpu}]
    if replicas.queue_ms is not None:  # Kubernetes takes the larger number of pods
        target = {"type": "AverageValue", "averageValue": str(replicas.queue_ms)}
        metrics.append({"type": "Pods", "pods": {"metric": {"name": _QUEUE_METRIC}, "target": target}})
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": member.name},
        "minReplicas": replicas.routers,
        "maxReplicas": replicas.most_routers,
        "metrics": metrics,
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    return _object("autoscaling/v2", "HorizontalPodAutoscaler", fleet, member, spec)


def _object(api_version: str, kind: str, fleet: Fleet, member: Member, spec: Object) -> Object:
    """An object with the name and the labels of a model."""
    metadata = {"name": member.name, "labels": labels_of(fleet, member)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}
