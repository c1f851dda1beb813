"""The objects of a model: a Deployment for what clients call, a StatefulSet for each host, and what is theirs."""

from export.kubernetes.addresses import GRPC_PORT, METRICS_PORT
from export.kubernetes.fleet import Fleet, Member, Replicas
from export.kubernetes.labels import Object, labels_of, metadata
from export.kubernetes.network import front_policy, host_policy
from export.kubernetes.options import PodOptions
from export.kubernetes.pods import pod_template

# Cores that are used, in percent of those requested, that the autoscaler aims at.
_CPU_PERCENT = 60
# A pod that is new is in DNS for so long before the next one is replaced.
_SETTLED_S = 10


def front_manifests(fleet: Fleet, replicas: Replicas, options: PodOptions) -> list[Object]:
    """All objects of what clients call."""
    front = fleet.front
    return [
        _deployment(fleet, front, options),
        _service(fleet, front),
        _disruption_budget(fleet, front),
        _autoscaler(fleet, front, replicas),
        front_policy(fleet, options),
    ]


def host_manifests(fleet: Fleet, host: Member, options: PodOptions) -> list[Object]:
    """All objects of a host."""
    return [
        _stateful_set(fleet, host, options),
        _service(fleet, host),
        _disruption_budget(fleet, host),
        host_policy(fleet, host, options),
    ]


def _deployment(fleet: Fleet, member: Member, options: PodOptions) -> Object:
    """Without a number of replicas: that is the autoscaler's, which each `kubectl apply` would set back."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(fleet, member) | _bundle_annotations(fleet),
        "spec": {
            "selector": {"matchLabels": labels_of(fleet, member)},
            "minReadySeconds": _SETTLED_S,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": pod_template(fleet, member, options),
        },
    }


def _bundle_annotations(fleet: Fleet) -> Object:
    bundle = f"{fleet.front.model}/{fleet.bundle.path.name}"
    return {"annotations": {"tbe-serving/bundle": bundle, "tbe-serving/manifest": f"sha256:{fleet.bundle.digest}"}}


def _stateful_set(fleet: Fleet, member: Member, options: PodOptions) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(fleet, member),
        "spec": {
            "replicas": member.replicas,
            "serviceName": member.name,
            "selector": {"matchLabels": labels_of(fleet, member)},
            "podManagementPolicy": "Parallel",
            "minReadySeconds": _SETTLED_S,
            "updateStrategy": {"type": "RollingUpdate"},
            "template": pod_template(fleet, member, options),
        },
    }


def _service(fleet: Fleet, member: Member) -> Object:
    """Without an address of its own: clients and routers see every pod that is ready, and take turns."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(fleet, member),
        "spec": {
            "clusterIP": "None",
            "selector": labels_of(fleet, member),
            "ports": [
                {"name": "grpc", "port": GRPC_PORT, "targetPort": "grpc", "appProtocol": "grpc"},
                {"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"},
            ],
        },
    }


def _disruption_budget(fleet: Fleet, member: Member) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(fleet, member),
        "spec": {
            "maxUnavailable": 1,
            # One that is not ready answers nobody: it must not keep a node from being emptied.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels_of(fleet, member)},
        },
    }


def _autoscaler(fleet: Fleet, member: Member, replicas: Replicas) -> Object:
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": _CPU_PERCENT}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(fleet, member),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": member.name},
            "minReplicas": replicas.routers,
            "maxReplicas": replicas.most_routers,
            "metrics": [{"type": "Resource", "resource": cpu}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
        },
    }
