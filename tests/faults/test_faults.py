"""Faults, each done to a real server; `make faults` does them more often and tells how long they took."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from tests.faults import clients, files, fresh, histories, lying, memory, reloads, servers, whole
from tests.faults.tools import Asked, published
from tests.support.leak_check import keeps_growing
from tests.support.long_cases import one_in

LOADS = [
    pytest.param(published, id="lookups"),
    pytest.param(whole.published, id="scores", marks=pytest.mark.long),
    pytest.param(histories.published, id="sequences"),
]


@pytest.mark.promise("Clients reconnect to a server that was killed and restarted")
@pytest.mark.parametrize("make_oracle", LOADS[:2])
def test_clients_reconnect_to_a_killed_and_restarted_server(
    make_oracle: Callable[[Path], Asked], tmp_path: Path
) -> None:
    result = servers.restarted(tmp_path, times=1, make_oracle=make_oracle)
    print(result.line())
    assert result.wrong == 0
    assert result.answers >= 8
    assert result.errors <= {"ServerUnavailable", "DeadlineExceeded"}
    assert result.left_over == 0


@pytest.mark.promise("A model whose process died serves lookups and scores again without any action of its clients")
@pytest.mark.parametrize("make_oracle", one_in(3, LOADS))
def test_clients_are_answered_after_a_model_process_was_killed(
    make_oracle: Callable[[Path], Asked], tmp_path: Path
) -> None:
    result = servers.stub_killed(tmp_path, times=1, make_oracle=make_oracle)
    print(result.line())
    assert result.wrong == 0
    assert result.answers >= 8


@pytest.mark.long
@pytest.mark.promise("A model whose process is paused is replaced, with or without requests")
@pytest.mark.parametrize("by", one_in(2, [servers.by_sigstop, servers.by_a_debugger]))
def test_clients_are_answered_after_a_model_process_was_paused(
    by: Callable[[psutil.Process], AbstractContextManager[None]], tmp_path: Path
) -> None:
    """tritonserver 2.51 ends when a process of its goes on after some seconds; twice, so that it is started again."""
    result = servers.paused(tmp_path, 2, by)
    print(result.line())
    assert result.wrong == 0
    assert result.answers >= 8


@pytest.mark.promise("Reloads of several processes under load lose no request and crash no process")
@pytest.mark.parametrize(("times", "instances"), one_in(2, [(5, 2), (10, reloads.INSTANCES)]))
def test_reloads_under_load_lose_no_request_and_crash_no_process(tmp_path: Path, times: int, instances: int) -> None:
    """A run does not count if the machine paused a process of the model: such a process ends itself."""
    for attempt in range(3):
        result = reloads.reloaded(tmp_path / str(attempt), times, instances)
        print(result.line())
        if not result.pauses:
            break
    assert (result.wrong, result.lost, result.crashes, result.crashed_at_end, result.bad_scrapes) == (0, 0, 0, 0, 0)
    assert result.counted == result.answers > 0
    assert result.ended >= times * instances // 2
    assert result.scrapes > times


@pytest.mark.promise(
    "Weights that are deleted, replaced, cut or overwritten under a server are refused when it reloads them"
)
@pytest.mark.long
@pytest.mark.parametrize("change", one_in(2, [files.deleted, files.replaced]))
def test_deleted_or_replaced_weights_stay_served_and_are_not_reloaded(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    result = files.weights_change(tmp_path, change, kill=True)
    assert (result.right, result.refused, result.wrong) == (20, 0, 0)  # what was mapped stays
    assert "wrong" not in result.after
    assert "weights.0.bin: " in result.said
    assert result.code == 1


@pytest.mark.promise(
    "Weights that are deleted, replaced, cut or overwritten under a server are refused when it reloads them"
)
@pytest.mark.long
def test_truncated_weights_are_refused_and_not_loaded(tmp_path: Path) -> None:
    """The kernel ends the process that reads them (SIGBUS)."""
    result = files.weights_change(tmp_path, files.truncated, kill=False)
    assert result.wrong == 0
    assert "wrong" not in result.after
    assert "weights.0.bin: expected 800 bytes, got 0: publish the bundle again" in result.said
    assert result.code == 1


@pytest.mark.promise(
    "Weights that are deleted, replaced, cut or overwritten under a server are refused when it reloads them"
)
def test_overwritten_weights_are_refused_on_reload(tmp_path: Path) -> None:
    """What is mapped changes with the file, which nothing of ours does; what is loaded anew is verified."""
    result = files.weights_change(tmp_path, files.overwritten, kill=True)
    assert result.wrong == 20
    assert set(result.after) <= {"refused", "wrong"}
    assert "weights.0.bin: expected SHA-256" in result.said
    assert result.code == 1


@pytest.mark.promise("Concurrent publishers of one model each publish a whole version of their own")
@pytest.mark.parametrize("count", one_in(2, [1, 2]))
def test_publishers_that_meet_all_publish_whole_versions(count: int, tmp_path: Path) -> None:
    bundles = files.published_at_once(tmp_path, publishers=2, count=count)
    assert sorted(int(bundle.name) for bundle in bundles) == [*range(1, 2 * count + 1)]


@pytest.mark.promise("Requests that were cancelled or are past their deadline are not looked up")
@pytest.mark.parametrize("cancelled", one_in(2, [True, False]), ids=["cancelled", "deadlines"])
def test_no_work_is_done_for_cancelled_or_expired_calls(tmp_path: Path, cancelled: bool) -> None:
    """However long it takes the server to hear of it: it is given more time until it has."""
    for settle_s in (1, 5, 30):
        result = clients.disconnected(tmp_path / str(settle_s), 300, cancelled=cancelled, settle_s=settle_s)
        print(result.line())
        assert result.neighbours_right == 16
        if result.looked_up == 0:
            return
    raise AssertionError(result.line())


@pytest.mark.promise("Bursts of cancelled calls under load end neither the service nor its stop")
def test_cancelled_calls_end_neither_the_server_nor_its_shutdown(tmp_path: Path) -> None:
    result = clients.give_up(tmp_path, seconds=2)
    print(result.line())
    assert result.answers == 16
    assert result.code == 0


@pytest.mark.promise("Clients that begin a call and fall silent delay no other client")
def test_slow_clients_delay_no_other_client(tmp_path: Path) -> None:
    result = clients.slow(tmp_path, per_kind=8)
    assert (result.right, result.requests, result.connections) == (200, 200, 48)


@pytest.mark.promise("Lengths that promise more ids than the payload holds are refused before anything is allocated")
def test_lengths_far_beyond_the_payload_are_refused_before_allocation(tmp_path: Path) -> None:
    refusals, grown = memory.lying_lengths(tmp_path)
    assert refusals == {"INVALID_ARGUMENT"}
    assert grown < 1 << 30  # a single one of these lengths is 16 GiB of ids


@pytest.mark.long
@pytest.mark.promise("A full /dev/shm fails only requests that may be retried")
def test_a_full_dev_shm_is_reported_and_recovered_from(tmp_path: Path) -> None:
    result = memory.shared_memory_full(tmp_path)
    assert "Failed to increase the shared memory pool size" in result.message
    assert result.right == result.requests


@pytest.mark.promise("A request far beyond every limit is refused, and more of them take no more memory")
def test_the_memory_of_a_huge_request_is_given_back(tmp_path: Path) -> None:
    """0.2 GB here, 1.9 GB in `make faults`: it grew by two and a half of them for each."""
    result = memory.huge(tmp_path, clients.message(25_000_000), times=5)
    print(result.line())
    # Some do not fit into the instance's shared memory beside what the first left there.
    assert result.refusals <= {"INVALID_ARGUMENT", "INTERNAL"}
    assert result.right == 16
    assert not keeps_growing(result.kept_bytes, result.request_bytes // 2), result.kept_bytes


@pytest.mark.long
@pytest.mark.promise("Invalid answers of a host fail only requests that need the host")
def test_a_lying_host_harms_only_requests_that_need_it(tmp_path: Path) -> None:
    result = lying.lied(tmp_path, 1)
    print(result.line())
    assert result.refused > result.lies
    assert (result.nameless, result.answered_out_of_a_lie, result.others_wrong, result.others_failed) == (0, 0, 0, [])
    assert result.retold <= 2


@pytest.mark.long
def test_rows_never_tear_or_go_back_whichever_process_is_killed(tmp_path: Path) -> None:
    result = fresh.changed(tmp_path, 20, seed=40)
    print(result.line())
    assert (result.torn, result.backwards, result.too_new, result.late) == (0, 0, 0, 0)
    assert result.reads > 10
    assert result.killed["delta_writer"] > 0


@pytest.mark.long
@pytest.mark.parametrize(("deltas", "on_hosts"), [(1_000, False), (200, True)], ids=["one server", "hosts"])
def test_many_deltas_go_by_and_no_row_is_torn_or_older(tmp_path: Path, deltas: int, on_hosts: bool) -> None:
    """Of all dtypes, in shards of rows and columns, while eight clients read of two instances."""
    result = fresh.hammered(tmp_path, deltas, on_hosts=on_hosts)
    print(result.line())
    assert (result.torn, result.backwards, result.too_new, result.late, result.refused) == (0, 0, 0, 0, 0)
    assert result.reads > 100


@pytest.mark.long
def test_sequence_scores_that_need_a_lost_host_are_refused_by_its_name(
    tmp_path: Path,
) -> None:
    result = histories.host_lost(tmp_path, 1)
    print(result.line())
    assert (result.wrong, result.nameless, result.others_failed) == (0, 0, 0)
    assert result.refused > 0
    assert (result.others_right, result.right_again) == (8, 8)
