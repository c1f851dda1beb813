"""How often a server is started anew."""

from serving.server.supervise import MOST, Restarts


def test_restarts_are_bounded_with_growing_pauses_after_failures() -> None:
    restarts = Restarts()
    pauses = [restarts.next_pause_s(has_served=number == 0) for number in range(MOST)]
    assert pauses == [0, 1, 3, 7, 15]
    assert restarts.next_pause_s(has_served=False) is None


def test_a_server_that_served_is_restarted_at_once_up_to_the_limit() -> None:
    restarts = Restarts()
    pauses = [restarts.next_pause_s(has_served=served) for served in (True, True, False, True, False)]
    assert pauses == [0, 0, 1, 0, 1]
    assert restarts.next_pause_s(has_served=True) is None
