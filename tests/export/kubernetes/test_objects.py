"""What is written: objects that Kubernetes takes, and that hang together."""

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from export.kubernetes.base import base_files
from export.kubernetes.fleet import Fleet, read_fleet
from export.kubernetes.objects import objects_of
from export.kubernetes.options import ManifestOptions
from serving.__main__ import app
from serving.triton.command_line import exit_timeout_of
from tests.export.kubernetes.conftest import IMAGE, OPTIONS

STORE = "s3://bucket/models"
# The oldest that is still supported, and the newest that the schemas know.
VERSIONS = ("1.33", kubernetes_validate.latest_version())
CASES: dict[str, dict[str, Any]] = {
    "mounted": {},
    "copied": {"copy": True},
    "signed": {"trusted_keys": True},
    "copied and signed": {"copy": True, "trusted_keys": True},
    "insecure": {"insecure": True},
    "from a store": {"claim": None, "store": STORE},
    "from a store and signed": {"claim": None, "store": STORE, "trusted_keys": True},
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def options(request: pytest.FixtureRequest, tmp_path: Path) -> ManifestOptions:
    (tmp_path / "trusted.pem").write_text("-----BEGIN PUBLIC KEY-----\n")
    keys = {"trusted_keys": tmp_path / "trusted.pem"} if "trusted_keys" in request.param else {}
    return replace(OPTIONS, **request.param | keys)


@pytest.fixture(params=["router", "model", "model in huge pages", "live model"])
def fleet(request: pytest.FixtureRequest, published: Path) -> Fleet:
    if request.param == "router":
        return router(published)
    model = read_fleet(published / "m" / "1", OPTIONS)
    sizes: dict[str, Any] = {"model in huge pages": {"huge_bytes": 3 << 30}, "live model": {"live_bytes": 3 << 30}}
    return replace(model, front=replace(model.front, **sizes.get(request.param, {})))


def router(published: Path) -> Fleet:
    return read_fleet(published / "Movies_V2" / "1", OPTIONS)


def objects(fleet: Fleet, options: ManifestOptions = OPTIONS, kind: str = "") -> dict[str, Any]:
    """The objects of a kind, by name; or all. kustomize's own files are for kubectl."""
    documents = [document for text in base_files(fleet, options).values() for document in yaml.safe_load_all(text)]
    of_kubernetes = [document for document in documents if "kustomize" not in document["apiVersion"]]
    named = {
        document["metadata"]["name"] if kind else f"{document['kind']} {document['metadata']['name']}": document
        for document in of_kubernetes
        if kind in ("", document["kind"])
    }
    assert kind or len(named) == len(of_kubernetes)
    return named


def pods(fleet: Fleet, options: ManifestOptions = OPTIONS) -> dict[str, Any]:
    """The template of each model's pods, by the name of its workload."""
    every = [object_ for member in fleet.members for object_ in objects_of(fleet, member, options)]
    return {
        object_["metadata"]["name"]: object_["spec"]["template"]
        for object_ in every
        if object_["kind"] in ("Deployment", "StatefulSet")
    }


def server_of(pod: Any) -> Any:
    (server,) = pod["spec"]["containers"]
    return server


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(fleet: Fleet, options: ManifestOptions, version: str) -> None:
    for object_ in objects(fleet, options).values():
        if object_["kind"] not in ("PodMonitor", "PrometheusRule"):  # the operator's own
            kubernetes_validate.validate(object_, version, strict=True)


def test_volumes_match_mounts_and_containers_are_restricted(fleet: Fleet, options: ManifestOptions) -> None:
    config_maps = objects(fleet, options, "ConfigMap").keys()
    for pod in pods(fleet, options).values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        containers = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
        mounts = [mount for container in containers for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == volumes.keys()
        assert config_maps == {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume}
        for container in containers:
            security = container["securityContext"]
            assert (security["readOnlyRootFilesystem"], security["capabilities"]) == (True, {"drop": ["ALL"]})
            assert security["allowPrivilegeEscalation"] is False
            assert container["image"] == IMAGE
        for mount in mounts:
            is_given = not volumes[mount["name"]].keys() & {"emptyDir"}
            assert mount.get("readOnly", False) or not is_given
        # Secrets are mounted as folders, which change with them. A file that is mounted alone does not.
        secrets = {name for name, volume in volumes.items() if "secret" in volume}
        assert bool(secrets) == (not options.insecure)
        assert not any("subPath" in mount for mount in mounts if mount["name"] in secrets)
        # A file that an argument names is in a folder that is mounted.
        for path in re.findall(r"(?<==)/[\w/.-]+", " ".join(server_of(pod)["args"])):
            folders = [mount["mountPath"] for mount in server_of(pod)["volumeMounts"]]
            assert any(path == folder or path.startswith(f"{folder}/") for folder in folders), path


def test_a_pod_sees_no_model_but_its_own(fleet: Fleet, options: ManifestOptions) -> None:
    by_name = pods(fleet, options)
    for member in fleet.members:
        pod = by_name[member.name]
        (mount,) = (mount for mount in server_of(pod)["volumeMounts"] if mount["name"] == "repository")
        folder = "models/" if options.store else ""
        assert (mount["mountPath"], mount["subPath"]) == (f"/repository/{member.model}", f"{folder}{member.model}")
        assert mount["readOnly"] is True
        before = {container["name"]: container for container in pod["spec"]["initContainers"]}
        assert ("copy" in before, "pull" in before) == (options.copy, options.store is not None)
        if options.copy:
            source, _ = before["copy"]["volumeMounts"]
            assert (source["name"], source["subPath"]) == ("source", member.model)
        if options.store:
            command = f"tbe-serve pull {STORE} /pulled/models --model={member.model} --serve={member.model}=1"
            assert before["pull"]["command"] == ["sh", "-ec", command]


def test_selectors_select_the_pods_of_one_workload(fleet: Fleet) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(fleet).items()}

    def selected(selector: dict[str, str]) -> set[str]:
        return {name for name, label in labels.items() if selector.items() <= label.items()}

    for object_ in objects(fleet).values():
        name, spec = object_["metadata"]["name"], object_["spec"]
        match object_["kind"]:
            case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
                assert selected(spec["selector"]["matchLabels"]) == {name}
            case "Service":
                assert selected(spec["selector"]) == {name}
            case "NetworkPolicy":
                assert selected(spec["podSelector"]["matchLabels"]) == {name}
            case "HorizontalPodAutoscaler":
                assert spec["scaleTargetRef"]["name"] == fleet.front.name == name
            case "PodMonitor":
                assert selected(spec["selector"]["matchLabels"]) == labels.keys()
    for name, stateful_set in objects(fleet, kind="StatefulSet").items():
        assert stateful_set["spec"]["serviceName"] == name


def test_only_routers_reach_hosts_and_hosts_reach_nothing(published: Path) -> None:
    fleet = router(published)
    policies = {name: policy["spec"] for name, policy in objects(fleet, kind="NetworkPolicy").items()}
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(fleet).items()}
    for host in fleet.hosts:
        lookups, metrics = policies[host.name]["ingress"]
        assert lookups["from"] == [{"podSelector": {"matchLabels": labels["movies-v2"]}}]
        assert [port["port"] for port in lookups["ports"]] == [8001]
        assert [port["port"] for port in metrics["ports"]] == [8002]
        assert (policies[host.name]["policyTypes"], policies[host.name]["egress"]) == (["Ingress", "Egress"], [])
    lookups, _ = policies["movies-v2"]["ingress"]
    assert lookups["from"] == [{"podSelector": {"matchLabels": {"movies-v2-client": "true"}}}]
    to_hosts, dns = policies["movies-v2"]["egress"]
    (to,) = to_hosts["to"]
    for host in fleet.hosts:
        assert to["podSelector"]["matchLabels"].items() <= labels[host.name].items()
    assert {port["port"] for port in dns["ports"]} == {53}


def test_replicas_of_a_host_are_on_nodes_of_their_own(published: Path) -> None:
    fleet = read_fleet(published / "Movies_V2" / "1", replace(OPTIONS, replicas_of={1: 3}))
    hosts, (deployment,) = objects(fleet, kind="StatefulSet"), objects(fleet, kind="Deployment").values()
    assert {name: host["spec"]["replicas"] for name, host in hosts.items()} == {
        "movies-v2-host-0": 2,
        "movies-v2-host-1": 3,
    }
    assert "replicas" not in deployment["spec"]  # the autoscaler's own: what is applied again would set it back
    for host in fleet.hosts:
        affinity = hosts[host.name]["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"]["matchLabels"]["tbe-serving/host"] == str(host.host)


def test_a_server_has_options_that_exist_and_probes_that_start_nothing(
    fleet: Fleet, options: ManifestOptions
) -> None:
    """What the probes ask for is there: `tests/serving/server/test_health_http.py`."""
    commands: Any = typer.main.get_command(app)
    declared = {option for param in commands.commands["run"].params for option in param.opts}
    paths = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    for pod in pods(fleet, options).values():
        server = server_of(pod)
        assert server["command"] == ["tbe-serve", "run", "/repository"]
        assert {argument.partition("=")[0] for argument in server["args"]} <= declared
        assert "--operations-host=0.0.0.0" in server["args"]
        assert {"name": "operations", "containerPort": 8002} in server["ports"]
        for probe, path in paths.items():
            assert server[probe]["httpGet"] == {"path": path, "port": "operations"}
            assert "exec" not in server[probe]


def test_a_pod_has_time_to_drain(fleet: Fleet) -> None:
    for pod in pods(fleet).values():
        server = server_of(pod)
        (drain_s,) = (int(arg.partition("=")[2]) for arg in server["args"] if arg.startswith("--drain-s="))
        # A first look, until it refuses connections.
        assert server["readinessProbe"]["periodSeconds"] <= drain_s / 2
        assert pod["spec"]["terminationGracePeriodSeconds"] >= drain_s + exit_timeout_of([])
        assert "lifecycle" not in server


def test_resources_are_those_that_the_model_needs(fleet: Fleet) -> None:
    by_name = pods(fleet)
    for member in fleet.members:
        huge = {"hugepages-2Mi": "3072Mi"} if member.huge_bytes else {}
        request, limit = (
            f"{math.ceil(size_bytes / 2**20)}Mi"
            for size_bytes in (member.memory.request_bytes, member.memory.limit_bytes)
        )
        assert server_of(by_name[member.name])["resources"] == {
            "requests": {"cpu": "2", "memory": request, **huge},
            "limits": {"memory": limit, **huge},
        }


def test_hosts_serve_two_versions_while_routers_change(published: Path) -> None:
    """Neither of the two states of the routers changes what hosts are run with: `kubectl apply` restarts none."""
    before, after = (
        read_fleet(published / "Movies_V2" / now, OPTIONS, hosts_also=also) for now, also in (("1", 2), ("2", 1))
    )
    assert objects(before, kind="StatefulSet") == objects(after, kind="StatefulSet")
    for fleet, versions in ((before, "1"), (after, "2")):
        for name, pod in pods(fleet).items():
            served = versions if name == "movies-v2" else "2,1"
            assert f"--serve={name.replace('movies-v2', 'Movies_V2')}={served}" in server_of(pod)["args"]


def test_hosts_ask_for_a_certificate_which_routers_have(published: Path) -> None:
    by_name = pods(router(published))
    secrets = {
        name: {
            volume["name"]: volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume
        }
        for name, pod in by_name.items()
    }
    of_router = {"tls": "movies-v2-tls", "hosts-tls": "movies-v2-hosts-client-tls"}
    assert secrets.pop("movies-v2") == of_router
    assert list(secrets.values()) == [{"tls": "movies-v2-hosts-tls"}] * 2
    (waits,) = by_name["movies-v2"]["spec"]["initContainers"]
    assert {variable["name"]: variable["value"] for variable in waits["env"]} == {
        "TBE_SERVE_TLS_CA": "/hosts-tls/ca.crt",
        "TBE_SERVE_TLS_SERVER_NAME": "movies-v2-hosts",
        "TBE_SERVE_TLS_CERT": "/hosts-tls/tls.crt",
        "TBE_SERVE_TLS_KEY": "/hosts-tls/tls.key",
    }
    for container in (waits, server_of(by_name["movies-v2"])):
        assert {"name": "hosts-tls", "mountPath": "/hosts-tls", "readOnly": True} in container["volumeMounts"]
    for name, pod in by_name.items():
        assert ("--tls-client-ca=/tls/ca.crt" in server_of(pod)["args"]) == (name != "movies-v2")


def test_pods_scale_on_cpu_use_and_optionally_on_queue_time(published: Path) -> None:
    fleet = router(published)

    def metrics(options: ManifestOptions) -> list[str]:
        (scaler,) = objects(fleet, options, "HorizontalPodAutoscaler").values()
        kubernetes_validate.validate(scaler, VERSIONS[-1], strict=True)
        return [str(metric.get("pods", metric.get("resource"))) for metric in scaler["spec"]["metrics"]]

    (cores,) = metrics(OPTIONS)
    _, wait = metrics(replace(OPTIONS, scale_on_queue_ms=5))
    assert "averageUtilization" in cores
    rule = (Path(__file__).parents[3] / "deploy" / "kubernetes" / "prometheus-adapter.yaml").read_text()
    (name,) = re.findall(r"name: {as: (\w+)}", rule)
    assert wait == str({"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": "5"}})


def test_values_that_yaml_or_a_shell_would_read_otherwise_are_quoted(published: Path) -> None:
    store = "s3://b/\n'c\"d\\e$f#: - &x *y {{ z }} é/"
    model = read_fleet(published / "m" / "1", OPTIONS, name="on")
    fleet = replace(model, front=replace(model.front, live_bytes=1))
    options = replace(OPTIONS, claim=None, store=store, metrics_from="12e3")
    pod = pods(fleet, options)["on"]
    (pull,) = pod["spec"]["initContainers"]
    assert shlex.split(pull["command"][2])[2] == store
    assert f"--deltas={store.rstrip('/')}.deltas" in server_of(pod)["args"]
    _, metrics = objects(fleet, options, "NetworkPolicy")["on"]["spec"]["ingress"]
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "12e3"}}}]
