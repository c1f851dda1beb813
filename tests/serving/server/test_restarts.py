"""How often a server is started anew."""

from serving.server.restarts import MOST, Restarts


def test_restarts_are_bounded_and_pause_longer_each_time() -> None:
    restarts = Restarts()
    pauses = [restarts.next_pause_s() for _ in range(MOST)]
    assert pauses == [0, 1, 3, 7, 15]
    assert restarts.next_pause_s() is None
