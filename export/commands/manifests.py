"""`tbe-export manifests`: write Kubernetes manifests for a bundle."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from export.kubernetes.addresses import check_addresses
from export.kubernetes.fleet import GRPC_PORT, Fleet, check_deltas, read_fleet
from export.kubernetes.options import ManifestOptions
from export.publish.published import bundle_of
from serving.bundle.manifest import MANIFEST
from serving.bundle.signature import TrustedKeys, signature_of
from serving.errors import ConfigurationError
from serving.terminal.app import complain, out
from serving.terminal.options import EVERY, as_given, by_name


def manifests(
    bundle: Annotated[
        Path,
        typer.Argument(
            help="A version, REPOSITORY/NAME/VERSION; or a model, REPOSITORY/NAME, for the version that it serves."
        ),
    ],
    out_: Annotated[Path, typer.Option("--out", help="Folder to write the kustomize base to.")],
    image: Annotated[str, typer.Option(help="Image of the server, by digest: REGISTRY/NAME@sha256:….")],
    claim: Annotated[
        str | None, typer.Option(help="PersistentVolumeClaim of the model repository, which pods mount read-only.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Instead of --claim: URL of the model repository in a store, such as s3://bucket/models. Each pod "
            "downloads its model to its node's disk before it starts."
        ),
    ] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="With --claim: each pod copies its model to its node's disk first.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the Kubernetes objects; by default the model's name.")
    ] = None,
    routers: Annotated[int, typer.Option(help="Least number of pods that clients call.")] = ManifestOptions.routers,
    most_routers: Annotated[
        int, typer.Option(help="Largest number of pods that clients call.")
    ] = ManifestOptions.most_routers,
    scale_on_queue_ms: Annotated[
        int | None,
        typer.Option(
            help="Start more pods when the mean queue time of requests exceeds this. Needs prometheus-adapter with "
            "the rule of deploy/kubernetes/prometheus-adapter.yaml."
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Pods of each host.")] = ManifestOptions.replicas,
    replicas_of: Annotated[list[str] | None, typer.Option(metavar="HOST=N", help="Pods of one host.")] = None,
    hosts_also: Annotated[
        int | None,
        typer.Option(
            min=1, help="During a rollout: another version of the router, whose shards the hosts serve as well."
        ),
    ] = None,
    trusted_keys: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with Ed25519 public keys. One of them must have signed every bundle; pods check it too."
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS. Use it only if a mesh or the like secures connections.")
    ] = False,
    metrics_from: Annotated[
        str, typer.Option(help="Namespace whose pods may read metrics.")
    ] = ManifestOptions.metrics_from,
    deltas_claim: Annotated[
        str | None,
        typer.Option(
            help="PersistentVolumeClaim of the deltas of models with `weights-memory: live`, which pods mount "
            "read-only. With --store the default is the folder STORE.deltas of the store."
        ),
    ] = None,
) -> None:
    """Write Kubernetes manifests for a bundle: for a router and its hosts, or for one model.

    A router's settings must have the addresses that the manifests give its hosts. If they differ, nothing is written,
    and the command that sets them is printed. If the folder has manifests already, options that change are printed.
    """
    options = ManifestOptions(
        image=image,
        claim=claim,
        store=store,
        copy=copy,
        trusted_keys=trusted_keys,
        insecure=insecure,
        metrics_from=metrics_from,
        deltas_claim=deltas_claim,
        routers=routers,
        most_routers=most_routers,
        scale_on_queue_ms=scale_on_queue_ms,
        replicas=replicas,
        replicas_of=dict(_of_host(host, text) for host, text in by_name(replicas_of).items()),
    )
    trusted = None if trusted_keys is None else TrustedKeys.read(trusted_keys)
    fleet = read_fleet(bundle_of(bundle, trusted), options, name=name, hosts_also=hosts_also, trusted=trusted)
    check_addresses(fleet, trusted, insecure=insecure)
    check_deltas(fleet, options)
    from export.kubernetes.base import base_files, changes, write_base  # a client-only install has no PyYAML

    files = base_files(fleet, options)
    changed = [*changes(out_, files)]
    write_base(out_, fleet, files)
    for change in changed:
        complain("tbe-export", f"changed: {change}")
    _show_next_steps(fleet, out_, options)


def _of_host(host: str, text: str) -> tuple[int, int]:
    if host == EVERY or not (host.isdecimal() and text.isdecimal()):
        raise ConfigurationError(f"--replicas-of {as_given(host, text)}: expected HOST=N, such as 2=3")
    return int(host), int(text)


def _show_next_steps(fleet: Fleet, folder: Path, options: ManifestOptions) -> None:
    """Print the command that deploys the manifests, and the objects that they need."""
    say = partial(out.print, soft_wrap=True)
    say(f"written to {folder}; deploy it: kubectl apply -k {folder}")
    if options.claim is not None:
        say(f"needed: PersistentVolumeClaim {options.claim}, with the repository")
    else:
        say(f"needed: {options.store}, with the repository (`tbe-export push`), which pods may read")
    if options.deltas_claim is not None:
        say(f"needed: PersistentVolumeClaim {options.deltas_claim}, with the deltas (`tbe-export delta --deltas`)")
    elif any(member.live_bytes for member in fleet.members):
        say(f"needed: {options.deltas}, with the deltas: `tbe-export delta --deltas {options.deltas}`")
    secrets = {f"{fleet.name}-tls": f"for {fleet.name}, what clients call"}
    if fleet.hosts:
        secrets[f"{fleet.name}-hosts-tls"] = f"for {fleet.hosts_server_name}, as servers and as clients"
        secrets[f"{fleet.name}-hosts-client-tls"] = "of routers, as clients of hosts, by the authority of the hosts"
    for secret, purpose in {} if options.insecure else secrets.items():
        say(f"needed: Secret {secret}, of type kubernetes.io/tls with ca.crt: a certificate {purpose}")
    say(f'pods labelled {fleet.name}-client: "true" may call {fleet.name}:{GRPC_PORT}')
    for host in fleet.hosts:
        if host.replicas == 1:
            say(f"note: host {host.host} has one replica: while it restarts, requests that need it fail")
    if options.trusted_keys is None and signature_of(fleet.bundle.path / MANIFEST).exists():
        say("note: the bundle is signed, but pods do not check it without --trusted-keys")
