"""What is deployed for a bundle, and the bundles for which nothing is."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from export import export_model
from export.kubernetes.fleet import Member, read_fleet
from serving.bundle.manifest import MANIFEST
from serving.errors import BundleError, ConfigurationError
from serving.model.config_file import apply_settings, read_config, write_config
from serving.model.settings import ServingSettings
from serving.tables import memory_budget
from serving.tables.pages import HUGE_PAGE
from tests.export.kubernetes.conftest import OPTIONS
from tests.support.scored_models import EXACT, dlrm


def test_a_router_s_fleet_is_the_hosts_of_its_plan(published: Path) -> None:
    fleet = read_fleet(published / "Movies_V2" / "2", replace(OPTIONS, routers=3))
    assert [(host.name, host.model, host.host, host.versions) for host in fleet.hosts] == [
        ("movies-v2-host-0", "Movies_V2-host-0", 0, (2,)),
        ("movies-v2-host-1", "Movies_V2-host-1", 1, (2,)),
    ]
    assert (fleet.front.name, fleet.front.model, fleet.front.versions) == ("movies-v2", "Movies_V2", (2,))
    assert (fleet.front.replicas, [host.replicas for host in fleet.hosts]) == (3, [2, 2])


def test_the_fleet_of_a_model_without_hosts_is_the_model_alone(published: Path) -> None:
    fleet = read_fleet(published / "m" / "1", OPTIONS, name="scores")
    assert (fleet.name, fleet.front.model, fleet.hosts) == ("scores", "m", ())


def configure(model: Path, settings: ServingSettings) -> None:
    config = read_config(model)
    apply_settings(config, settings)
    write_config(model, config)


@pytest.mark.parametrize(
    ("settings", "cores"),
    [
        (ServingSettings(instances=3), 1),
        (ServingSettings(instances=3, threads=2), 2),
        (ServingSettings(instances=3, threads=2, score_threads=4), 2),
    ],
)
def test_processes_and_cores_follow_from_the_settings(
    settings: ServingSettings, cores: int, repository: Path
) -> None:
    configure(repository / "m", settings)
    front = read_fleet(repository / "m" / "1", OPTIONS).front
    assert (front.instances, front.cores) == (3, cores)


def test_locked_weights_are_refused_because_pods_may_not_lock_memory(repository: Path) -> None:
    configure(repository / "m", ServingSettings(weights_memory="locked"))
    with pytest.raises(
        ConfigurationError, match="weights-memory: expected 'mapped', 'huge' or 'live' in pods, got 'locked'"
    ):
        read_fleet(repository / "m" / "1", OPTIONS)


def test_weights_on_huge_pages_are_rounded_up_to_whole_pages(repository: Path) -> None:
    configure(repository / "m", ServingSettings(weights_memory="huge"))
    front = read_fleet(repository / "m" / "1", OPTIONS).front
    assert front.weights_bytes < front.huge_bytes == HUGE_PAGE


def test_hosts_have_room_for_both_versions(published: Path) -> None:
    one, two = (read_fleet(published / "Movies_V2" / "2", OPTIONS, hosts_also=also) for also in (None, 1))
    assert [host.versions for host in two.hosts] == [(2, 1), (2, 1)]
    assert [host.weights_bytes for host in two.hosts] == [2 * host.weights_bytes for host in one.hosts]
    assert two.front == one.front


def test_a_host_s_own_bundle_is_not_deployed(published: Path) -> None:
    with pytest.raises(BundleError, match="expected a router's bundle, got that of its host 1: give Movies_V2"):
        read_fleet(published / "Movies_V2-host-1" / "1", OPTIONS)


def test_a_host_without_its_bundle_is_refused(repository: Path) -> None:
    shutil.rmtree(repository / "Movies_V2-host-1" / "1")
    with pytest.raises(BundleError, match=f"Movies_V2-host-1/1/{MANIFEST}: cannot be read"):
        read_fleet(repository / "Movies_V2" / "1", OPTIONS)


def test_a_host_with_another_bundle_is_refused(repository: Path) -> None:
    host = repository / "Movies_V2-host-1"
    shutil.rmtree(host / "1")
    (host / "2").rename(host / "1")
    with pytest.raises(
        BundleError, match=r"Movies_V2-host-1/1: expected the bundle with SHA-256 [0-9a-f]{64} of its manifest, which"
    ):
        read_fleet(repository / "Movies_V2" / "1", OPTIONS)


def test_another_model_s_name_is_refused(repository: Path) -> None:
    shutil.copytree(repository / "m", repository / "movies.v2")
    with pytest.raises(ConfigurationError, match=r"movies-v2: .* the name of model 'movies\.v2'"):
        read_fleet(repository / "Movies_V2" / "1", OPTIONS)
    assert read_fleet(repository / "Movies_V2" / "1", OPTIONS, name="movies").name == "movies"


def test_replicas_of_no_host_are_refused(published: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--replicas-of: expected hosts of the plan, \[0, 1\], got 2"):
        read_fleet(published / "Movies_V2" / "1", replace(OPTIONS, replicas_of={2: 3}))


def test_score_threads_have_cores_where_a_model_scores(tmp_path: Path) -> None:
    export_model(dlrm(), tmp_path / "r", "m", EXACT)
    for settings, cores in (
        (ServingSettings(threads=2, score_threads=4), 4),
        (ServingSettings(threads=2, score_threads=1), 2),
        (ServingSettings(threads=2), 2),
    ):
        configure(tmp_path / "r" / "m", settings)
        assert read_fleet(tmp_path / "r" / "m" / "1", OPTIONS).front.cores == cores


GIB = 1 << 30


def member(weights_gib: int, instances: int) -> Member:
    return Member(
        name="m-host-0",
        model="m-host-0",
        host=0,
        versions=(1,),
        weights_bytes=weights_gib * GIB,
        instances=instances,
        cores=1,
        replicas=2,
        instance_shared_bytes=128 << 20,
    )


@pytest.mark.parametrize(
    # 500 GiB are nine tenths of 568,889 MiB, which is more than there would be beside requests and answers.
    ("weights_gib", "instances", "limit_mib"),
    [(0, 1, 1024 + 256), (10, 1, 10240 + 1024 + 256), (500, 4, 568_889)],
)
def test_memory_is_that_of_the_weights_and_the_processes(weights_gib: int, instances: int, limit_mib: int) -> None:
    pod = member(weights_gib, instances)
    assert pod.requested_cores == instances + 1
    assert pod.memory.request_bytes == weights_gib * GIB + (256 << 20) * (instances + 1)
    assert -(-pod.memory.limit_bytes // (1 << 20)) == limit_mib


@pytest.mark.parametrize(("weights_gib", "instances"), [(0, 1), (10, 1), (30, 1), (100, 2), (500, 4)])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_server_with_the_memory_limit_keeps_its_weights_in_memory(
    weights_gib: int, instances: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = member(weights_gib, instances).memory.limit_bytes
    monkeypatch.setattr(memory_budget, "memory_limit", lambda: limit_bytes)
    assert memory_budget.most_weights_bytes(instances, is_pinned=is_pinned) >= weights_gib * GIB


def test_weights_in_huge_pages_are_no_memory_and_copies_that_deltas_change_are() -> None:
    copied_bytes = 10 * GIB + (2 << 20)
    huge, live = (replace(member(10, 2), **{name: copied_bytes}) for name in ("huge_bytes", "live_bytes"))  # type: ignore[arg-type]
    assert huge.memory == member(0, 2).memory
    assert live.memory.request_bytes == copied_bytes + (768 << 20)
    assert live.memory.limit_bytes == copied_bytes + 2 * (768 + 256 << 20)
    assert live.shm_bytes == copied_bytes + 4 * (128 << 20)


def test_a_copy_has_room_and_its_server_has_time() -> None:
    large = member(500, 1)
    assert large.copy_bytes > large.weights_bytes
    assert large.start_s > member(0, 1).start_s + 1000
    assert replace(large, cores=3).requested_cores == 4
