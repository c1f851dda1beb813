"""What happens to the link of a machine."""

import time
from contextlib import AbstractContextManager

import numpy as np

from tests.faults.hosts.callers import asking, until_back
from tests.faults.hosts.fleet import Fleet

DROP_IN, DROP_OUT = "INPUT -i eth0 -j DROP", "OUTPUT -o eth0 -j DROP"
REJECT_IN = "INPUT -i eth0 -p tcp -j REJECT --reject-with tcp-reset"
_LOSS = "-m statistic --mode random --probability 0.3 -j DROP"
LOSE_IN, LOSE_OUT = f"INPUT -i eth0 {_LOSS}", f"OUTPUT -o eth0 {_LOSS}"
# A fault is kept up for so long.
FAULT_S = 6.0


def slow_link(fleet: Fleet, what: str, slowed: AbstractContextManager[None]) -> str:
    """Callers whose packets all go over a slow link."""
    until_back(fleet)
    with slowed, asking(fleet.router.grpc, fleet.requests(1)) as answers:
        time.sleep(FAULT_S)
    return (
        f"{what}: {len(answers.right):,} answers, {len(answers.wrong)} wrong, {len(answers.failed)} failed, "
        f"p50 {1000 * np.median(answers.took):.1f} ms"
    )
