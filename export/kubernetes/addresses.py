"""The addresses of a router's hosts, and its certificates for them: its settings must name both as the manifests do.

Pods mount the repository read-only, and settings may be signed. So settings are checked before a manifest is written.
"""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from export.kubernetes.fleet import GRPC_PORT, Fleet
from serving.bundle.signature import TrustedKeys, signature_of
from serving.errors import ConfigurationError
from serving.model.config_file import CONFIG, read_config, settings_of
from serving.model.settings import ServingSettings

# The folder of a router's client certificate for its hosts, in its pods.
_HOSTS_TLS = "/hosts-tls"


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
            yield f"expected host {host.host} at {host.address}, got {address}"
    if unknown := sorted(addresses.keys() - {str(host.host) for host in fleet.hosts}):
        yield f"expected no address of host {unknown[0]}, which the plan does not have"
    for name, expected in tls.items():
        if getattr(settings, name) != expected:
            yield f"expected {name} {expected}, got {getattr(settings, name)}"


def _tls_settings(fleet: Fleet, *, insecure: bool) -> dict[str, str | None]:
    files = {"root_certificates": "ca.crt", "certificate_chain": "tls.crt", "private_key": "tls.key"}
    settings = {f"hosts_{name}": f"{_HOSTS_TLS}/{file}" for name, file in files.items()}
    settings["hosts_server_name"] = fleet.hosts_server_name
    return {name: None if insecure else value for name, value in settings.items()}


def _configure(model: Path, fleet: Fleet, settings: ServingSettings, *, insecure: bool) -> str:
    """The commands that set the expected settings, and sign them if the current ones are signed."""
    command = ["tbe-serve", "configure", str(model)]
    forget = [[*command, "--no-hosts"]] if settings.hosts else []
    for host in fleet.hosts:
        command += ["--host", f"{host.host}={host.address}"]
    for name, value in _tls_settings(fleet, insecure=insecure).items():
        option = name.replace("_", "-")
        if value is not None:
            command += [f"--{option}", value]
        elif getattr(settings, name) is not None:
            command += [f"--no-{option}"]
    if os.path.lexists(signature_of(model / CONFIG)):
        command += ["--signing-key", "KEY.pem"]
    return " && ".join(map(shlex.join, [*forget, command]))
