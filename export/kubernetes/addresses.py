"""The addresses and certificates of a fleet: how a router finds its hosts, and which Secrets pods need.

Certificates: callers check the name in a server's certificate. Hosts answer only callers with a certificate of the
authority that signed their own, such as routers.

Settings: a router's settings must name the hosts as the manifests do. Pods mount the repository read-only, and
settings may be signed. So the settings are checked before any manifest is written.
"""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from export.kubernetes.fleet import Fleet, Member
from serving.bundle.signature import TrustedKeys, signature_of
from serving.errors import ConfigurationError
from serving.model.config_file import CONFIG, read_config, settings_of
from serving.model.settings import ServingSettings

# Folders in a pod: of its server's certificate, and of a router's client certificate for its hosts.
TLS, HOSTS_TLS = "/tls", "/hosts-tls"


def hosts_server_name(fleet: Fleet) -> str:
    """The name in the certificates of all hosts."""
    return f"{fleet.name}-hosts"


def secret_of(fleet: Fleet, member: Member) -> str:
    """The Secret with the certificate of a pod's server."""
    return f"{fleet.name if member.host is None else hosts_server_name(fleet)}-tls"


def hosts_client_secret(fleet: Fleet) -> str:
    """The Secret with a router's client certificate for its hosts."""
    return f"{hosts_server_name(fleet)}-client-tls"


def secrets_of(fleet: Fleet) -> dict[str, str]:
    """All Secrets, each with the use of its certificate. Their type is kubernetes.io/tls, with ca.crt."""
    uses = {secret_of(fleet, fleet.front): f"for {fleet.name}, what clients call"}
    if fleet.hosts:
        uses[secret_of(fleet, fleet.hosts[0])] = f"for {hosts_server_name(fleet)}, as servers and as clients"
        uses[hosts_client_secret(fleet)] = "of routers, as clients of hosts, by the authority of the hosts"
    return uses


def arguments(member: Member) -> list[str]:
    """The TLS options of `tbe-serve run` in a pod."""
    options = [f"--tls-cert={TLS}/tls.crt", f"--tls-key={TLS}/tls.key"]
    return options if member.host is None else [*options, f"--tls-client-ca={TLS}/ca.crt"]


def calls_to_hosts(fleet: Fleet) -> list[dict[str, Any]]:
    """The environment variables of a container that calls hosts."""
    values = {
        "CA": f"{HOSTS_TLS}/ca.crt",
        "SERVER_NAME": hosts_server_name(fleet),
        "CERT": f"{HOSTS_TLS}/tls.crt",
        "KEY": f"{HOSTS_TLS}/tls.key",
    }
    return [{"name": f"TBE_SERVE_TLS_{name}", "value": value} for name, value in values.items()]


GRPC_PORT, OPERATIONS_PORT = 8001, 8002


def address_of(name: str) -> str:
    """The address of all replicas of a host: its headless Service has a DNS record for each of them."""
    return f"dns:///{name}:{GRPC_PORT}"


def check_addresses(fleet: Fleet, trusted: TrustedKeys | None, *, insecure: bool) -> None:
    """Refuse a router whose settings do not name the hosts of the manifests.

    Args:
        fleet: the fleet that the manifests deploy.
        trusted: one of these keys must have signed the settings. None: no signature is needed.
        insecure: whether hosts are called without TLS.

    Raises:
        ConfigurationError: the settings differ. The message has the `tbe-serve configure` that sets them.
    """
    if not fleet.hosts:
        return
    model = fleet.bundle.path.parent
    settings = settings_of(read_config(model, trusted))
    if wrong := next(_differences(fleet, settings, _tls_settings(fleet, insecure=insecure)), None):
        raise ConfigurationError(
            f"{model / CONFIG}: {wrong}: the router would not find its hosts. Run this first: "
            f"{_configure(model, fleet, settings, insecure=insecure)}"
        )


def _differences(fleet: Fleet, settings: ServingSettings, tls: dict[str, str | None]) -> Iterator[str]:
    addresses = settings.hosts or {}
    for host in fleet.hosts:
        # The name may have a domain, as in movies-host-0.production.svc.cluster.local.
        address = addresses.get(str(host.host))
        if address is None or not re.fullmatch(rf"(dns:///)?{host.name}(\.[a-z0-9.-]+)?:{GRPC_PORT}", address):
            yield f"expected host {host.host} at {address_of(host.name)}, got {address}"
    if unknown := sorted(addresses.keys() - {str(host.host) for host in fleet.hosts}):
        yield f"expected no address of host {unknown[0]}, which the plan does not have"
    for name, expected in tls.items():
        if getattr(settings, name) != expected:
            yield f"expected {name} {expected}, got {getattr(settings, name)}"


def _tls_settings(fleet: Fleet, *, insecure: bool) -> dict[str, str | None]:
    files = {"root_certificates": "ca.crt", "certificate_chain": "tls.crt", "private_key": "tls.key"}
    settings = {f"hosts_{name}": f"{HOSTS_TLS}/{file}" for name, file in files.items()}
    settings["hosts_server_name"] = hosts_server_name(fleet)
    return {name: None if insecure else value for name, value in settings.items()}


def _configure(model: Path, fleet: Fleet, settings: ServingSettings, *, insecure: bool) -> str:
    """The commands that set the expected settings, and sign them if the current ones are signed."""
    command = ["tbe-serve", "configure", str(model)]
    forget = [[*command, "--no-hosts"]] if settings.hosts else []
    for host in fleet.hosts:
        command += ["--host", f"{host.host}={address_of(host.name)}"]
    for name, value in _tls_settings(fleet, insecure=insecure).items():
        option = name.replace("_", "-")
        if value is not None:
            command += [f"--{option}", value]
        elif getattr(settings, name) is not None:
            command += [f"--no-{option}"]
    if os.path.lexists(signature_of(model / CONFIG)):
        command += ["--signing-key", "KEY.pem"]
    return " && ".join(map(shlex.join, [*forget, command]))
