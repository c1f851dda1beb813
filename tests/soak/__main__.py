"""`make soak`: half an hour each of lookups, of fresh rows and of scores, and more load than there is capacity; ends in a line of figures."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.soak.overload import overload
from tests.soak.served import fresh, lookups, scores
from tests.soak.soak import soak
from tests.support.process_cleanup import end_together

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seconds", type=float, default=1800)
arguments = parser.parse_args()
end_together()
with tempfile.TemporaryDirectory(prefix="tbe-soak-") as folder:
    soaked = []
    for publish in (lookups, fresh, scores):
        print(f"soak: {arguments.seconds:g} s of {publish.__name__}", file=sys.stderr)
        soaked.append(soak(Path(folder) / publish.__name__, arguments.seconds, publish))
    print("soak: more load than there is capacity", file=sys.stderr)
    overloaded = overload(Path(folder) / "overload", 10.0)
wrong = [*(line for soak_run in soaked for line in soak_run.wrong), *overloaded.wrong]
for line in wrong:
    print(line, file=sys.stderr)
print(" | ".join([*(soak_run.line() for soak_run in soaked), overloaded.line()]))
sys.exit(bool(wrong or any(soak_run.errors for soak_run in soaked)))
