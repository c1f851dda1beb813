"""Certificates: which Secrets there have to be, and who shows which to whom.

Clients check the name of what they call. Hosts answer nobody without a certificate by the authority that signed
theirs: that is a router's, or their own, which their probes show.
"""

from typing import Any

from export.kubernetes.fleet import Fleet, Member

# Where a pod has the certificate that it answers with, and where a router has the one that it shows hosts.
TLS, HOSTS_TLS = "/tls", "/hosts-tls"


def hosts_server_name(fleet: Fleet) -> str:
    """The name in the certificates of all hosts."""
    return f"{fleet.name}-hosts"


def secret_of(fleet: Fleet, member: Member) -> str:
    """The Secret with the certificate that a pod answers with."""
    return f"{_server_name(fleet, member)}-tls"


def hosts_client_secret(fleet: Fleet) -> str:
    """The Secret with the certificate that a router shows hosts."""
    return f"{hosts_server_name(fleet)}-client-tls"


def secrets_of(fleet: Fleet) -> dict[str, str]:
    """All Secrets, of the type kubernetes.io/tls with ca.crt, and what their certificates are for."""
    found = {secret_of(fleet, fleet.front): f"for {fleet.name}, what clients call"}
    if fleet.hosts:
        found[secret_of(fleet, fleet.hosts[0])] = f"for {hosts_server_name(fleet)}, as servers and as clients"
        found[hosts_client_secret(fleet)] = "of routers, as clients of hosts, by the authority of the hosts"
    return found


def arguments(member: Member) -> list[str]:
    """The options of `tbe-serve run`."""
    found = [f"--tls-cert={TLS}/tls.crt", f"--tls-key={TLS}/tls.key"]
    return found if member.host is None else [*found, f"--tls-client-ca={TLS}/ca.crt"]


def calls_to_itself(fleet: Fleet, member: Member) -> list[dict[str, Any]]:
    """The environment of a pod's probes."""
    shows = None if member.host is None else TLS
    return _environment(TLS, _server_name(fleet, member), shows)


def calls_to_hosts(fleet: Fleet) -> list[dict[str, Any]]:
    """The environment of what calls hosts."""
    return _environment(HOSTS_TLS, hosts_server_name(fleet), HOSTS_TLS)


def _server_name(fleet: Fleet, member: Member) -> str:
    return fleet.name if member.host is None else hosts_server_name(fleet)


def _environment(folder: str, server_name: str, shows: str | None) -> list[dict[str, Any]]:
    values = {"CA": f"{folder}/ca.crt", "SERVER_NAME": server_name}
    if shows is not None:
        values |= {"CERT": f"{shows}/tls.crt", "KEY": f"{shows}/tls.key"}
    return [{"name": f"TBE_SERVE_TLS_{name}", "value": value} for name, value in values.items()]
