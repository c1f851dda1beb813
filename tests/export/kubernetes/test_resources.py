"""What a pod asks for, by the bytes of its weights and its processes."""

import pytest

from export.kubernetes.fleet import Member
from export.kubernetes.resources import copy_bytes, mebibytes, resources, start_s

GIB = 1 << 30


def member(weights_gib: int, instances: int) -> Member:
    return Member(
        name="m-host-0",
        model="m-host-0",
        host=0,
        versions=(1,),
        weights_bytes=weights_gib * GIB,
        instances=instances,
        replicas=2,
    )


@pytest.mark.parametrize(("weights_gib", "instances"), [(0, 1), (10, 1), (500, 4)])
def test_memory_is_that_of_the_weights_and_the_processes(weights_gib: int, instances: int) -> None:
    found = resources(member(weights_gib, instances))
    requested = weights_gib * 1024 + 512 * (instances + 1)
    assert found["requests"] == {"cpu": str(instances + 1), "memory": f"{requested}Mi"}
    assert found["limits"] == {"memory": f"{requested + 1024 * instances}Mi"}


def test_a_copy_has_room_and_its_server_has_time() -> None:
    large = member(500, 1)
    assert copy_bytes(large) > large.weights_bytes
    assert start_s(large) > start_s(member(0, 1)) + 1000


def test_a_part_of_a_mebibyte_is_one() -> None:
    assert (mebibytes(1), mebibytes(1 << 20), mebibytes((1 << 20) + 1)) == ("1Mi", "1Mi", "2Mi")
