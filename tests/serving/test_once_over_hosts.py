"""The user side once, of tables that are on several hosts."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import ServerUnavailable
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.scored_models import ON_HOSTS, trained, two_tower
from tests.support.servers import lose
from tests.support.shared import assert_scores, pairs, repeated


@pytest.mark.long
def test_through_a_router(tmp_path: Path) -> None:
    """Bit for bit what one request for each pair gets; a host that is lost is named where a row of it is needed."""
    module = trained(two_tower())
    router = export_hosts(tmp_path, module, ON_HOSTS)
    bags, dense, shared, expected = pairs(module, 0, 9)
    whole = repeated(bags, shared, 9)

    with fleet(tmp_path, router) as served, LookupClient(served.router.grpc, MODEL, 20) as client:
        repeats = client.lookup(whole)
        with Engine.open(router, served.hosts) as engine:
            answers = [
                (client.lookup(bags, shared=shared), client.score(bags, dense, shared=shared)),
                (engine.lookup(bags, shared=shared), engine.score(bags, dense, shared=shared)),
            ]
        for looked_up, scores in answers:
            assert_scores(scores, expected)
            for name, rows in repeats.items():
                np.testing.assert_array_equal(np.broadcast_to(looked_up[name], rows.shape), rows)
        for host, server in served.servers.items():
            lose(server)
            with pytest.raises(ServerUnavailable, match=f"host {host} "):
                client.score(bags, dense, shared=shared)
            named = []
            for call in (partial(client.lookup, whole), partial(client.lookup, bags, shared=shared)):
                with pytest.raises(ServerUnavailable, match=r"tables .*: host ") as refused:
                    call()
                named.append(str(refused.value).partition("tables ")[2].partition(": host ")[0])
            assert named[0] == named[1]
            break
