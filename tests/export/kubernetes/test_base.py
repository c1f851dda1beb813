"""What is written: objects that Kubernetes takes, and that hang together."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from export.errors import PublishError
from export.kubernetes.base import base_files, write_base
from export.kubernetes.containers import DRAIN_S
from export.kubernetes.fleet import METRICS_FROM, Fleet, PodOptions, Replicas, read_fleet
from export.kubernetes.workloads import pod_template
from serving.__main__ import app
from serving.triton.command_line import exit_timeout_of
from tests.export.kubernetes.conftest import IMAGE, options_for
from tests.support.commands import tbe_export

# The oldest that is still supported, and the newest that the schemas know.
STORE = "s3://bucket/models"
VERSIONS = ("1.33", kubernetes_validate.latest_version())
OPTIONS = {
    "mounted": {},
    "copied": {"copy": True},
    "signed": {"trusted_keys": True},
    "copied and signed": {"copy": True, "trusted_keys": True},
    "insecure": {"insecure": True},
    "from a store": {"store": STORE},
    "from a store and signed": {"store": STORE, "trusted_keys": True},
}


@pytest.fixture(params=list(OPTIONS.values()), ids=list(OPTIONS))
def options(request: pytest.FixtureRequest, tmp_path: Path) -> PodOptions:
    (tmp_path / "trusted.pem").write_text("-----BEGIN PUBLIC KEY-----\n")
    options = dict(request.param)
    if "trusted_keys" in options:
        options["trusted_keys"] = tmp_path / "trusted.pem"
    return PodOptions(image=IMAGE, claim=None if "store" in options else "models", **options)


@pytest.fixture(params=["Movies_V2", "m"])
def fleet(request: pytest.FixtureRequest, published: Path) -> Fleet:
    return read_fleet(published / request.param / "1", Replicas())


def objects(files: dict[str, str]) -> list[Any]:
    """All objects for Kubernetes; kustomize's own files are for kubectl."""
    documents = [document for text in files.values() for document in yaml.safe_load_all(text)]
    return [document for document in documents if "kustomize" not in document["apiVersion"]]


def workloads(files: dict[str, str]) -> dict[str, Any]:
    return {
        resource["metadata"]["name"]: resource
        for resource in objects(files)
        if resource["kind"] in ("Deployment", "StatefulSet")
    }


def server_of(workload: Any) -> Any:
    (server,) = workload["spec"]["template"]["spec"]["containers"]
    return server


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(fleet: Fleet, options: PodOptions, version: str) -> None:
    every = objects(base_files(fleet, Replicas(), options))
    for object_ in every:
        if object_["kind"] not in ("PodMonitor", "PrometheusRule"):  # the operator's own
            kubernetes_validate.validate(object_, version, strict=True)
    names = [(object_["kind"], object_["metadata"]["name"]) for object_ in every]
    assert len(names) == len({*names})


def test_a_wrong_object_would_be_noticed(published: Path) -> None:
    files = base_files(read_fleet(published / "m" / "1", Replicas()), Replicas(), PodOptions(image=IMAGE, claim="c"))
    wrong = workloads(files)["m"]
    server_of(wrong)["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_what_is_mounted_is_there_and_what_is_there_is_mounted(fleet: Fleet, options: PodOptions) -> None:
    files = base_files(fleet, Replicas(), options)
    config_maps = {resource["metadata"]["name"] for resource in objects(files) if resource["kind"] == "ConfigMap"}
    for workload in workloads(files).values():
        pod = workload["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        containers = [*pod["initContainers"], *pod["containers"]]
        assert {mount["name"] for container in containers for mount in container["volumeMounts"]} == volumes
        assert config_maps == {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
        for container in containers:
            security = container["securityContext"]
            assert (security["readOnlyRootFilesystem"], security["capabilities"]) == (True, {"drop": ["ALL"]})
            assert security["allowPrivilegeEscalation"] is False
            assert container["image"] == IMAGE
            for mount in container["volumeMounts"]:
                is_given = mount["name"] in ("source", "tls", "hosts-tls", "trusted-keys")
                assert mount.get("readOnly", False) or not is_given
        # Of folders, which change with their Secret. A file that is mounted alone does not.
        secrets = {volume["name"] for volume in pod["volumes"] if "secret" in volume}
        mounts = [
            mount for container in containers for mount in container["volumeMounts"] if mount["name"] in secrets
        ]
        assert bool(mounts) == (not options.insecure)
        assert not any("subPath" in mount for mount in mounts)
        # A file that an argument names is in a folder that is mounted.
        for path in re.findall(r"(?<==)/[\w/.-]+", " ".join(server_of(workload)["args"])):
            mounts = [mount["mountPath"] for mount in server_of(workload)["volumeMounts"]]
            assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts), path


def test_a_pod_sees_no_model_but_its_own(fleet: Fleet, options: PodOptions) -> None:
    for member in (fleet.front, *fleet.hosts):
        workload = workloads(base_files(fleet, Replicas(), options))[member.name]
        (mount,) = [mount for mount in server_of(workload)["volumeMounts"] if mount["name"] == "repository"]
        folder = "models/" if options.store else ""
        assert (mount["mountPath"], mount["subPath"]) == (f"/repository/{member.model}", f"{folder}{member.model}")
        assert mount["readOnly"] is True
        copies = [
            container
            for container in workload["spec"]["template"]["spec"]["initContainers"]
            if container["name"] == "copy"
        ]
        assert len(copies) == options.copy
        for copy in copies:
            assert {mount["name"]: mount.get("subPath") for mount in copy["volumeMounts"]}["source"] == member.model
        pulls = [
            container
            for container in workload["spec"]["template"]["spec"]["initContainers"]
            if container["name"] == "pull"
        ]
        assert len(pulls) == (options.store is not None)
        for pull in pulls:
            command = f"tbe-serve pull {STORE} /pulled/models --model={member.model} --serve={member.model}=1"
            assert pull["command"] == ["sh", "-ec", command]
            assert {mount["name"]: mount["mountPath"] for mount in pull["volumeMounts"]}["repository"] == "/pulled"


def test_selectors_select_the_pods_of_one_workload(fleet: Fleet) -> None:
    files = base_files(fleet, Replicas(), PodOptions(image=IMAGE, claim="models"))
    labels = {name: workload["spec"]["template"]["metadata"]["labels"] for name, workload in workloads(files).items()}

    def selected(selector: dict[str, str]) -> set[str]:
        return {name for name, label in labels.items() if selector.items() <= label.items()}

    for resource in objects(files):
        name, spec = resource["metadata"]["name"], resource["spec"]
        match resource["kind"]:
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
    stateful = {name: workload for name, workload in workloads(files).items() if workload["kind"] == "StatefulSet"}
    assert {name: value["spec"]["serviceName"] for name, value in stateful.items()} == {
        host.name: host.name for host in fleet.hosts
    }


def test_routers_alone_reach_hosts_and_hosts_reach_nobody(published: Path) -> None:
    fleet = read_fleet(published / "Movies_V2" / "1", Replicas())
    files = base_files(fleet, Replicas(), PodOptions(image=IMAGE, claim="models"))
    policies = {
        resource["metadata"]["name"]: resource["spec"]
        for resource in objects(files)
        if resource["kind"] == "NetworkPolicy"
    }
    labels = {name: workload["spec"]["template"]["metadata"]["labels"] for name, workload in workloads(files).items()}
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
    fleet = read_fleet(published / "Movies_V2" / "1", Replicas(of_hosts=2, of_host={1: 3}))
    by_name = workloads(base_files(fleet, Replicas(), PodOptions(image=IMAGE, claim="models")))
    replicas = {name: value["spec"].get("replicas") for name, value in by_name.items()}
    # The autoscaler's own: what is applied again would set it back.
    assert replicas == {"movies-v2": None, "movies-v2-host-0": 2, "movies-v2-host-1": 3}
    for host in fleet.hosts:
        affinity = by_name[host.name]["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"]["matchLabels"]["tbe-serving/host"] == str(host.host)


def test_probes_ask_the_operations_port_and_start_nothing(fleet: Fleet, options: PodOptions) -> None:
    """What they ask for is there: `tests/serving/server/test_health_http.py`."""
    paths = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    for member in (fleet.front, *fleet.hosts):
        server = server_of(workloads(base_files(fleet, Replicas(), options))[member.name])
        assert {"name": "operations", "containerPort": 8002} in server["ports"]
        for probe, path in paths.items():
            assert server[probe]["httpGet"] == {"path": path, "port": "operations"}
            assert "exec" not in server[probe]
        assert "--operations-host=0.0.0.0" in server["args"]


def test_what_is_run_has_the_options_that_it_is_given(fleet: Fleet, options: PodOptions) -> None:
    """A program that exists, with options that it has."""
    commands: Any = typer.main.get_command(app)
    declared = {option for param in commands.commands["run"].params for option in param.opts}
    for workload in workloads(base_files(fleet, Replicas(), options)).values():
        server = server_of(workload)
        assert server["command"] == ["tbe-serve", "run", "/repository"]
        assert {argument.partition("=")[0] for argument in server["args"]} <= declared


def test_a_pod_has_time_to_drain_and_to_answer_what_it_accepted(published: Path) -> None:
    fleet = read_fleet(published / "m" / "1", Replicas())
    pod = pod_template(fleet, fleet.front, PodOptions(image=IMAGE, claim="models"))["spec"]
    (container,) = pod["containers"]
    assert f"--drain-s={DRAIN_S}" in container["args"]
    assert container["readinessProbe"]["periodSeconds"] <= DRAIN_S / 2  # a first look, until it refuses connections
    assert pod["terminationGracePeriodSeconds"] >= DRAIN_S + exit_timeout_of([])
    assert "lifecycle" not in container


def test_memory_is_that_of_the_plan(published: Path) -> None:
    """The request of a host has room for its weights; the files say how large they are."""
    fleet = read_fleet(published / "Movies_V2" / "1", Replicas())
    for member in (fleet.front, *fleet.hosts):
        weights = published / member.model / "1" / "weights.0.bin"
        assert member.weights_bytes == weights.stat().st_size
    by_name = workloads(base_files(fleet, Replicas(), PodOptions(image=IMAGE, claim="models")))
    large = {name: server_of(value)["resources"] for name, value in by_name.items()}
    assert all(resources_of["requests"]["memory"].endswith("Mi") for resources_of in large.values())
    for resources_of in large.values():
        assert int(resources_of["requests"]["memory"][:-2]) < int(resources_of["limits"]["memory"][:-2])
        assert "cpu" not in resources_of["limits"]


def test_hosts_serve_two_versions_while_routers_change(published: Path) -> None:
    """Neither of the two states of the routers changes what hosts are run with: `kubectl apply` restarts none."""
    options = PodOptions(image=IMAGE, claim="models")
    states = [
        workloads(
            base_files(read_fleet(published / "Movies_V2" / now, Replicas(), hosts_also=also), Replicas(), options)
        )
        for now, also in (("1", 2), ("2", 1))
    ]
    before, after = states
    for host in ("movies-v2-host-0", "movies-v2-host-1"):
        assert before[host] == after[host]
        assert f"--serve=Movies_V2{host.removeprefix('movies-v2')}=2,1" in server_of(before[host])["args"]
    assert "--serve=Movies_V2=1" in server_of(before["movies-v2"])["args"]
    assert "--serve=Movies_V2=2" in server_of(after["movies-v2"])["args"]


def test_a_later_base_replaces_an_earlier_one_and_nothing_else(published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "k8s"
    options = PodOptions(image=IMAGE, claim="models")
    router, model = (read_fleet(published / name / "1", Replicas()) for name in ("Movies_V2", "m"))
    write_base(folder, router, base_files(router, Replicas(), options))
    assert (folder / "host-1.yaml").exists()
    fewer = {name: text for name, text in base_files(router, Replicas(), options).items() if name != "host-1.yaml"}
    write_base(folder, router, fewer)
    assert not (folder / "host-1.yaml").exists()
    with pytest.raises(PublishError, match="found other files"):
        write_base(folder, model, base_files(model, Replicas(), options))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.yaml").touch()
    with pytest.raises(PublishError, match="expected no such folder, an empty one, or an earlier base for 'm'"):
        write_base(tmp_path / "other", model, base_files(model, Replicas(), options))


def test_hosts_ask_for_a_certificate_which_routers_have(published: Path) -> None:
    fleet = read_fleet(published / "Movies_V2" / "1", Replicas())
    by_name = workloads(base_files(fleet, Replicas(), PodOptions(image=IMAGE, claim="models")))
    router = by_name["movies-v2"]["spec"]["template"]["spec"]
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in router["volumes"] if "secret" in volume}
    assert secrets == {"tls": "movies-v2-tls", "hosts-tls": "movies-v2-hosts-client-tls"}
    assert "--tls-client-ca=/tls/ca.crt" not in server_of(by_name["movies-v2"])["args"]
    (waits,) = router["initContainers"]
    called = {variable["name"]: variable["value"] for variable in waits["env"]}
    assert (called["TBE_SERVE_TLS_CERT"], called["TBE_SERVE_TLS_SERVER_NAME"]) == (
        "/hosts-tls/tls.crt",
        "movies-v2-hosts",
    )
    for host in fleet.hosts:
        server = server_of(by_name[host.name])
        assert "--tls-client-ca=/tls/ca.crt" in server["args"]


def test_pods_are_as_many_as_cores_or_the_wait_of_requests_ask_for(published: Path) -> None:
    fleet = read_fleet(published / "Movies_V2" / "1", Replicas())

    def metrics(**numbers: int) -> list[str]:
        every = objects(base_files(fleet, Replicas(**numbers), PodOptions(image=IMAGE, claim="models")))  # type: ignore[arg-type]
        (scaler,) = (object_ for object_ in every if object_["kind"] == "HorizontalPodAutoscaler")
        kubernetes_validate.validate(scaler, VERSIONS[-1], strict=True)
        return [str(metric.get("pods", metric.get("resource"))) for metric in scaler["spec"]["metrics"]]

    (cores,) = metrics()
    _, wait = metrics(queue_ms=5)
    assert "averageUtilization" in cores
    rule = (Path(__file__).parents[3] / "deploy" / "kubernetes" / "prometheus-adapter.yaml").read_text()
    (name,) = re.findall(r"name: {as: (\w+)}", rule)
    assert wait == str({"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": "5"}})


def test_options_that_are_forgotten_the_next_time_are_said(configured: Path, tmp_path: Path) -> None:
    """Pods would be fewer, and unsigned bundles served, without a word."""
    out = tmp_path / "k8s"

    def said(*more: str) -> list[str]:
        done = tbe_export("manifests", str(configured), *options_for(out, *more))
        assert done.exit_code == 0, done.stderr
        return [str(line).removeprefix("tbe-export: changed: ") for line in done.stderr.splitlines()]

    assert said("--routers", "3", "--replicas-of", "1=3", "--copy", "--metrics-from", "watch") == []
    assert said("--routers", "3", "--replicas-of", "1=3", "--copy", "--metrics-from", "watch") == []
    assert said() == [
        "--routers: 3 before, now 2",
        "--replicas-of 1: 3 before, now 2",
        "--copy: yes before, now no",
        f"--metrics-from: watch before, now {METRICS_FROM}",
    ]
    assert said() == []
    assert said("--replicas", "4", "--hosts-also", "1", "--scale-on-queue-ms", "9") == [
        "--scale-on-queue-ms: none before, now 9",
        "--replicas-of 0: 2 before, now 4",
        "--replicas-of 1: 2 before, now 4",
        "--hosts-also: none before, now 1",
    ]
    text = (out / "kustomization.yaml").read_text()
    assert yaml.safe_load(text)["kind"] == "Kustomization"
    (out / "kustomization.yaml").write_text(text.replace('{"--routers"', "{--routers"))
    assert said() == []
