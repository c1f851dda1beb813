"""The files of a kustomize base: one for the model that clients call, one for each host, and shared ones."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import yaml

from export.errors import PublishError
from export.kubernetes.fleet import Fleet, Member
from export.kubernetes.objects import Object, objects_of, pod_monitor, prometheus_rule, trusted_keys
from export.kubernetes.options import ManifestOptions
from serving.files import UNREADABLE, replacing

KUSTOMIZATION = "kustomization.yaml"
# A separate component: a cluster without Prometheus' operator refuses its objects.
PROMETHEUS = "prometheus-operator"
_LINE_LENGTH = 120
# The line of a kustomization with the options of its base begins so.
_MADE_WITH = "# Made with: "


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _: object) -> bool:
        """Write equal parts twice: YAML aliases make manifests hard to read and to patch."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Write text of several lines as a block, and quote text that some readers of YAML take for a number."""
    style = "|" if "\n" in text else "'" if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_AMBIGUOUS = re.compile(r"[-+.]?[0-9][0-9a-zA-Z_.+-]*|[yYnN]")
_Dumper.add_representer(str, _represent_text)


def base_files(fleet: Fleet, options: ManifestOptions) -> dict[str, str]:
    """The text of every file, by its path in the base."""
    resources = {_file_of(fleet, member): objects_of(fleet, member, options) for member in fleet.members}
    if options.trusted_keys is not None:
        resources["trusted-keys.yaml"] = [trusted_keys(fleet, options.trusted_keys)]
    prometheus = {"pod-monitor.yaml": [pod_monitor(fleet)], "prometheus-rule.yaml": [prometheus_rule()]}
    files = {
        **resources,
        KUSTOMIZATION: [_kustomization("v1beta1", "Kustomization", resources)],
        f"{PROMETHEUS}/{KUSTOMIZATION}": [_kustomization("v1alpha1", "Component", prometheus)],
        **{f"{PROMETHEUS}/{path}": documents for path, documents in prometheus.items()},
    }
    texts = {path: _text(fleet, documents) for path, documents in files.items()}
    head, body = texts[KUSTOMIZATION].split("\n", 1)
    made_with = f"{_MADE_WITH}{json.dumps(_chosen(fleet, options))}"  # in ASCII: YAML ends a comment at U+2028
    return texts | {KUSTOMIZATION: "\n".join([head, made_with, body])}


def _file_of(fleet: Fleet, member: Member) -> str:
    if member.host is not None:
        return f"host-{member.host}.yaml"
    return "router.yaml" if fleet.hosts else "lookup.yaml"


def _kustomization(version: str, kind: str, resources: Iterable[str]) -> Object:
    return {"apiVersion": f"kustomize.config.k8s.io/{version}", "kind": kind, "resources": sorted(resources)}


def _chosen(fleet: Fleet, options: ManifestOptions) -> dict[str, str]:
    """The values of options that are easily forgotten when the base is made again, by option."""
    also = sorted({version for host in fleet.hosts for version in host.versions} - {int(fleet.bundle.path.name)})
    return {
        "--routers": str(options.routers),
        "--most-routers": str(options.most_routers),
        "--scale-on-queue-ms": str(options.scale_on_queue_ms or "none"),
        **{f"--replicas-of {host.host}": str(host.replicas) for host in fleet.hosts},
        "--hosts-also": ", ".join(map(str, also)) or "none",
        "--store": options.store or "none",
        "--copy": "yes" if options.copy else "no",
        "--trusted-keys": "none" if options.trusted_keys is None else "given",
        "--insecure": "yes" if options.insecure else "no",
        "--metrics-from": options.metrics_from,
        "--deltas-claim": options.deltas_claim or "none",
    }


def changes(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    """The options that differ between `files` and the base in a folder, such as "--routers: 3 before, now 2".

    There are none if the base in the folder does not record its options.
    """
    path = folder / KUSTOMIZATION
    before, now = (
        _made_with(text) for text in (path.read_text("utf-8") if path.exists() else "", files[KUSTOMIZATION])
    )
    for option, value in before.items():
        if now.get(option, "none") != value:
            yield f"{option}: {value} before, now {now.get(option, 'none')}"


def _made_with(text: str) -> dict[str, str]:
    for line in text.splitlines():
        if line.startswith(_MADE_WITH):
            with suppress(*UNREADABLE):  # the file may have been edited
                return msgspec.json.decode(line.removeprefix(_MADE_WITH), type=dict[str, str])
    return {}


def write_base(folder: Path, fleet: Fleet, files: Mapping[str, str]) -> None:
    """Write the files of a base into a folder, in place of those of an earlier base of the same name.

    Args:
        folder: is made if it does not exist.
        fleet: the fleet that the base deploys.
        files: text by path.

    Raises:
        PublishError: the folder has other files.
        OSError: it cannot be written to.
    """
    before = _resources_of(folder, fleet)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder / path) as file:
            file.write(text.encode())
    for obsolete in before - files.keys():
        (folder / obsolete).unlink(missing_ok=True)


def _resources_of(folder: Path, fleet: Fleet) -> set[str]:
    """The resources of the base in a folder."""
    if not folder.exists() or not any(folder.iterdir()):
        return set()
    path = folder / KUSTOMIZATION
    text = path.read_text("utf-8") if path.exists() else ""
    if not text.startswith(_made_for(fleet)):
        raise PublishError(
            f"{folder}: expected no such folder, an empty one, or an earlier base for {fleet.name!r}, found other "
            "files: give another, --out"
        )
    return set(yaml.safe_load(text)["resources"])


def _made_for(fleet: Fleet) -> str:
    return f"# Made by tbe-export manifests for {fleet.name}: "


def _text(fleet: Fleet, documents: Iterable[Object]) -> str:
    of = f"{fleet.front.model} version {fleet.bundle.path.name}"
    head = f"{_made_for(fleet)}{of}. Patch it from an overlay; what is written here is lost the next time.\n"
    bodies = [yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=_LINE_LENGTH) for document in documents]
    return head + "---\n".join(bodies)
