"""Who may reach whom: clients reach what they call, routers alone reach hosts, and hosts reach nobody."""

from export.kubernetes.addresses import GRPC_PORT, METRICS_PORT
from export.kubernetes.fleet import Fleet, Member
from export.kubernetes.labels import Object, client_labels, hosts_labels, labels_of, metadata
from export.kubernetes.options import PodOptions


def front_policy(fleet: Fleet, options: PodOptions) -> Object:
    """The policy of what clients call. A router calls hosts, and DNS to find them."""
    to_hosts = {"to": [_pods(hosts_labels(fleet))], "ports": _tcp(GRPC_PORT)}
    dns = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    return _policy(fleet, fleet.front, client_labels(fleet), [to_hosts, dns] if fleet.hosts else [], options)


def host_policy(fleet: Fleet, host: Member, options: PodOptions) -> Object:
    """The policy of a host."""
    return _policy(fleet, host, labels_of(fleet, fleet.front), [], options)


def _policy(
    fleet: Fleet, member: Member, callers: dict[str, str], egress: list[Object], options: PodOptions
) -> Object:
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": options.metrics_from}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(fleet, member),
        "spec": {
            "podSelector": {"matchLabels": labels_of(fleet, member)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"from": [_pods(callers)], "ports": _tcp(GRPC_PORT)},
                {"from": [monitoring], "ports": _tcp(METRICS_PORT)},
            ],
            "egress": egress,
        },
    }


def _tcp(port: int) -> list[Object]:
    """By number: not every network knows the names that other pods give their ports."""
    return [{"protocol": "TCP", "port": port}]


def _pods(labels: dict[str, str]) -> Object:
    return {"podSelector": {"matchLabels": labels}}
