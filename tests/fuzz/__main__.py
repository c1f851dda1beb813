"""`make fuzz`: a hundred thousand messages to a real server, and one line of figures."""

import argparse
import sys
import tempfile
from pathlib import Path

import psutil

from serving.server import Ports, run_server
from tests.fuzz.killer import recovery_s
from tests.fuzz.lies import fuzz_hosts
from tests.fuzz.operations import fuzz_operations
from tests.fuzz.run import fuzz
from tests.fuzz.served import deltas, publish
from tests.support.process_cleanup import end_together

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--count", type=int, default=100_000)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--messages", action="store_true", help="print what the server said, and how often")
arguments = parser.parse_args()
end_together()
with tempfile.TemporaryDirectory(prefix="tbe-fuzz-") as folder:
    models = publish(Path(folder) / "repository")
    free = Ports(grpc=0, http=0, operations=0)
    repository = Path(folder) / "repository"
    with run_server(repository, free, log=Path(folder) / "log") as server, deltas(repository, models):
        outcome = fuzz(server.grpc, psutil.Process(server.process.pid), models, arguments.count, arguments.seed)
        operations = fuzz_operations(server, arguments.count // 20, arguments.seed)
        recovered_s = recovery_s(server, models[0])
    (Path(folder) / "hosts").mkdir()
    lies = fuzz_hosts(Path(folder) / "hosts", arguments.count // 10, arguments.seed)
for line in (*outcome.wrong, *operations.wrong, *lies.wrong):
    print(line, file=sys.stderr)
if arguments.messages:
    for status, said in outcome.said.items():
        for text, times in said.most_common(12):
            print(f"{times:8,}  {status}  {text!r}")
recovered = f"after the message that kills a model it served again in {recovered_s:.1f} s"
print("; ".join((outcome.line(), recovered, operations.line(), lies.line())))
sys.exit(bool(outcome.wrong or operations.wrong or lies.wrong))
