"""The Kubernetes objects of a fleet. Those of a model are in model.yaml.jinja, the alerts in alerts.yaml."""

import math
import shlex
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from export.kubernetes.fleet import Fleet, Member
from export.kubernetes.options import ManifestOptions

Object = dict[str, Any]


def objects_of(fleet: Fleet, member: Member, options: ManifestOptions) -> list[Object]:
    """All objects of a model."""
    instance = _instance_labels(fleet)
    hosts = instance | {"app.kubernetes.io/component": "host"}
    front = instance | {"app.kubernetes.io/component": "router" if fleet.hosts else "lookup"}
    is_host = member.host is not None
    text = _TEMPLATES.get_template("model.yaml.jinja").render(
        fleet=fleet,
        member=member,
        options=options,
        labels=hosts | {"tbe-serving/host": str(member.host)} if is_host else front,
        caller_labels=front if is_host else {f"{fleet.name}-client": "true"},
        hosts_labels=hosts,
    )
    return list(yaml.safe_load_all(text))


def pod_monitor(fleet: Fleet) -> Object:
    """The PodMonitor of all pods. Each series has labels for the part of the fleet and the host."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": fleet.name, "labels": _instance_labels(fleet)},
        "spec": {
            "selector": {"matchLabels": _instance_labels(fleet)},
            "podTargetLabels": ["app.kubernetes.io/component", "tbe-serving/host"],
            "podMetricsEndpoints": [{"port": "operations", "path": "/metrics", "interval": "15s"}],
        },
    }


def prometheus_rule() -> Object:
    """The PrometheusRule of every model that is served: the recording rules and alerts of alerts.yaml."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tbe-serving", "labels": {"app.kubernetes.io/name": "tbe-serving"}},
        "spec": yaml.safe_load((_FOLDER / "alerts.yaml").read_text("utf-8")),
    }


def trusted_keys(fleet: Fleet, path: Path) -> Object:
    """The ConfigMap of public keys."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{fleet.name}-trusted-keys"},
        "data": {"trusted.pem": path.read_text("utf-8")},
    }


def _instance_labels(fleet: Fleet) -> dict[str, str]:
    return {"app.kubernetes.io/name": "tbe-serving", "app.kubernetes.io/instance": fleet.name}


def _as_yaml(value: Any) -> str:
    """A value as quoted YAML in one line. What the filter `shell` returns is left as it is."""
    if isinstance(value, int | Markup):
        return str(value)
    return yaml.safe_dump([value], default_flow_style=True, default_style='"', width=math.inf, sort_keys=False)[1:-2]


def _mebibytes(size_bytes: int) -> str:
    return f"{math.ceil(size_bytes / (1 << 20))}Mi"


def _shell(word: str) -> Markup:
    """A word of a script that is a double-quoted YAML string."""
    return Markup(_as_yaml(shlex.quote(word))[1:-1])  # noqa: S704  Jinja's way to say that it is quoted


_FOLDER = Path(__file__).parent
_TEMPLATES = jinja2.Environment(  # noqa: S701  YAML and not HTML
    loader=jinja2.FileSystemLoader(_FOLDER), finalize=_as_yaml, undefined=jinja2.StrictUndefined
)
_TEMPLATES.filters |= {"mebibytes": _mebibytes, "shell": _shell}
