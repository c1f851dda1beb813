"""Labels: which pods are of which model of which fleet."""

from typing import Any

from export.kubernetes.fleet import Fleet, Member

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
    """The labels of pods that may look up."""
    return {f"{fleet.name}-client": "true"}


def metadata(fleet: Fleet, member: Member, name: str | None = None) -> Object:
    """The metadata of an object that belongs to a model.

    Args:
        fleet: what is deployed.
        member: the model.
        name: of the object; the model's own where None.
    """
    return {"name": name or member.name, "labels": labels_of(fleet, member)}


def _fleet_labels(fleet: Fleet) -> dict[str, str]:
    return {"app.kubernetes.io/name": "tbe-serving", "app.kubernetes.io/instance": fleet.name}
