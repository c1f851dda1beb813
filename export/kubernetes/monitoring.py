"""A PodMonitor, for Prometheus' operator. Without the operator, annotations of the pods say what to scrape."""

from export.kubernetes.fleet import Fleet
from export.kubernetes.labels import Object


def pod_monitor(fleet: Fleet) -> Object:
    """Metrics of all pods. A series says which part of the fleet it is of, and which host."""
    instance = {"app.kubernetes.io/name": "tbe-serving", "app.kubernetes.io/instance": fleet.name}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": fleet.name, "labels": instance},
        "spec": {
            "selector": {"matchLabels": instance},
            "podTargetLabels": ["app.kubernetes.io/component", "tbe-serving/host"],
            "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": "15s"}],
        },
    }
