"""The pods of a model: who they are, where they may be, and what is in them."""

from export.kubernetes.addresses import METRICS_PORT
from export.kubernetes.containers import before_server, server
from export.kubernetes.fleet import Fleet, Member
from export.kubernetes.labels import Object, labels_of
from export.kubernetes.options import PodOptions
from export.kubernetes.volumes import volumes

# SIGTERM answers what was accepted; this is how long that may take, with the pause before it.
_GRACE_S = 45
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
        "affinity": {"podAntiAffinity": _apart(fleet, member)},
        "topologySpreadConstraints": [_over_zones(fleet, member)],
        "initContainers": before_server(fleet, member, options),
        "containers": [server(fleet, member, options)],
        "volumes": list(volumes(fleet, member, options)),
    }
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)}
    return {"metadata": {"labels": labels_of(fleet, member), "annotations": annotations}, "spec": spec}


def _apart(fleet: Fleet, member: Member) -> Object:
    """Replicas of a host are on nodes of their own: a node that is lost takes one of them. Others are if they can."""
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
