"""`make soak`: half an hour of load, and more load than there is capacity; ends in one line of figures."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.soak.overload import overload
from tests.soak.soak import soak
from tests.support.ending import end_together

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seconds", type=float, default=1800)
arguments = parser.parse_args()
end_together()
with tempfile.TemporaryDirectory(prefix="tbe-soak-") as folder:
    print(f"soak: {arguments.seconds:g} s of load", file=sys.stderr)
    soaked = soak(Path(folder) / "soak", arguments.seconds)
    print("soak: more load than there is capacity", file=sys.stderr)
    overloaded = overload(Path(folder) / "overload", 10.0)
for line in (*soaked.wrong, *overloaded.wrong):
    print(line, file=sys.stderr)
print(f"{soaked.line()} | {overloaded.line()}")
sys.exit(bool(soaked.wrong or overloaded.wrong or soaked.errors))
