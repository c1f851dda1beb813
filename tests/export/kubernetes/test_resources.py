"""What a pod asks for, by the bytes of its weights and its processes."""

from dataclasses import replace

import pytest

from export.kubernetes.containers import copy_bytes, mebibytes, resources, shared_bytes, start_s
from export.kubernetes.fleet import Member
from serving.tables import memory_budget

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
    ("weights_gib", "instances", "limit"),
    [(0, 1, 1024 + 256), (10, 1, 10240 + 1024 + 256), (500, 4, 568_889)],
)
def test_memory_is_that_of_the_weights_and_the_processes(weights_gib: int, instances: int, limit: int) -> None:
    pod_resources = resources(member(weights_gib, instances))
    requested = weights_gib * 1024 + 256 * (instances + 1)
    assert pod_resources["requests"] == {"cpu": str(instances + 1), "memory": f"{requested}Mi"}
    assert pod_resources["limits"] == {"memory": f"{limit}Mi"}


@pytest.mark.parametrize(("weights_gib", "instances"), [(0, 1), (10, 1), (30, 1), (100, 2), (500, 4)])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_server_with_that_limit_keeps_its_weights_in_memory(
    weights_gib: int, instances: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = mebibytes_of(resources(member(weights_gib, instances))["limits"]["memory"]) << 20
    monkeypatch.setattr(memory_budget, "memory_limit", lambda: limit)
    assert memory_budget.most_weights_bytes(instances, is_pinned=is_pinned) >= weights_gib * GIB


def mebibytes_of(quantity: str) -> int:
    assert quantity.endswith("Mi")
    return int(quantity[:-2])


def test_weights_in_huge_pages_are_asked_for_as_such_and_not_as_memory() -> None:
    pod_resources = resources(replace(member(10, 2), huge_bytes=10 * GIB + (2 << 20)))
    assert pod_resources["requests"] == {"cpu": "3", "memory": "768Mi", "hugepages-2Mi": "10242Mi"}
    assert pod_resources["limits"] == {"memory": f"{2 * (768 + 256)}Mi", "hugepages-2Mi": "10242Mi"}


def test_copies_that_deltas_change_are_memory_and_lie_in_dev_shm() -> None:
    live = replace(member(10, 2), live_bytes=10 * GIB + (2 << 20))
    pod_resources = resources(live)
    assert pod_resources["requests"] == {"cpu": "3", "memory": f"{10242 + 768}Mi"}
    assert pod_resources["limits"] == {"memory": f"{10242 + 2 * (768 + 256)}Mi"}
    assert shared_bytes(live) == live.live_bytes + 4 * (128 << 20)


def test_threads_have_cores() -> None:
    assert resources(replace(member(10, 2), cores=3))["requests"]["cpu"] == "7"


def test_a_copy_has_room_and_its_server_has_time() -> None:
    large = member(500, 1)
    assert copy_bytes(large) > large.weights_bytes
    assert start_s(large) > start_s(member(0, 1)) + 1000


def test_a_part_of_a_mebibyte_is_one() -> None:
    assert (mebibytes(1), mebibytes(1 << 20), mebibytes((1 << 20) + 1)) == ("1Mi", "1Mi", "2Mi")
