"""`make demo-hosts`: tables on four hosts, one killed, a version rolled out; what happened is printed, and a page."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import grpc
import numpy as np
import psutil
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from examples.hosts.network import Lan, Machine, lan
from export import ExportConfig, Sharding, WeightDtype, export_model
from export.trained.checkpoint import Checkpoint
from export.trained.generated import generated_checkpoint
from export.trained.tables import TrainedTable, collect_tables
from serving.client import LookupClient, Retries
from serving.errors import ServingError

FOLDER = Path("build/demo-hosts")
PAGE = FOLDER / "what-happened.md"
MODEL = "dlrm"
HOSTS = 4
# MLPerf's DLRM-v2: rows and ids for each sample, dim 128. Rows are capped, so that the demo takes minutes.
DIM, CAP = 128, 1_000_000
# fmt: off
ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)
IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on
# Tables with more rows are on the hosts, the others in the router.
SMALL = 500_000
SAMPLES = 16
# What a host may take, server and tables together, in bytes. All tables and a server take more.
LIMIT_BYTES = 700 << 20
PATIENCE_S = 90.0
# Between two lookups of a caller: the machine has other work, such as an export.
PAUSE_S = 0.05
_CGROUPS = (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"))


def tables() -> EmbeddingBagCollection:
    """The tables, without rows: they are generated as they are read."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{number}", num_embeddings=min(rows, CAP), embedding_dim=DIM, feature_names=[f"f{number}"]
            )
            for number, rows in enumerate(ROWS)
        ],
        device="meta",
    )


@dataclass(frozen=True)
class Shifted:
    """A generated table of a version: its rows are scaled by it."""

    generated: Checkpoint
    table: TrainedTable
    by: int
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and dim."""
        return self.table.rows, self.table.dim

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) as float32 [stop − start, dim]."""
        return self.generated.rows(self.table, start, stop) * (1 + self.by / 8)


def export(repository: Path, version: int) -> Path:
    """Publish the router's bundle and one for each host; each version has rows of its own."""
    module = tables()
    trained = collect_tables(module).tables
    generated = generated_checkpoint(trained)
    shifted = {table.key: Shifted(generated, table, version) for table in trained}
    large = {f"t{number}": "table_wise" for number, rows in enumerate(ROWS) if rows > SMALL}
    config = ExportConfig(
        dtype={"*": WeightDtype.INT4},
        sharding=Sharding(
            ranks=HOSTS,
            ranks_per_host=1,
            hosts_as_models=True,
            types={"*": "data_parallel", **large, "t20": "row_wise", "t21": "row_wise"},
        ),
    )
    return export_model(module, repository, MODEL, config, version, checkpoint=Checkpoint("generated", shifted))


@dataclass
class Report:
    """What happened, as lines of a page."""

    began: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)

    def say(self, line: str = "") -> None:
        """Print a line, and keep it for the page."""
        print(line, flush=True)
        self.lines.append(line)

    def step(self, what: str) -> None:
        """A step begins."""
        self.say(f"\n## {what} ({time.monotonic() - self.began:.0f} s)\n")


@dataclass
class Seen:
    """What callers met since the last time that somebody looked."""

    answers: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)

    def line(self) -> str:
        """In one sentence."""
        by_version = ", ".join(f"{count:,} of version {version}" for version, count in sorted(self.answers.items()))
        median = f"{1000 * np.median(self.took_s):.1f} ms" if self.took_s else "no"
        return (
            f"{by_version or 'no'} answers, p50 {median}; {self.wrong} wrong or mixed; {self.errors.total()} refused"
        )


@dataclass(frozen=True)
class Place:
    """Where a server runs.

    Attributes:
        address: where it listens.
        within: the command that runs it there.
    """

    address: str
    within: tuple[str, ...] = ()


@contextmanager
def served(repository: Path, place: Place, group: Path | None) -> Iterator["subprocess.Popen[str]"]:
    """`tbe-serve run`, ready; in a cgroup where there is one."""
    joins = () if group is None else ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    access = ("--insecure",) if place.within else ()
    command = [*joins, *place.within, sys.executable, "-m", "serving", "run", str(repository), "--json", "--follow"]
    options = ["--unload-after-s", "3", "--host", place.address, "--grpc-port", "8401", "--metrics-port", "8402"]
    log = repository.with_suffix(".log")
    with log.open("w") as file, _started([*command, *options, *access], file) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit(f"{repository}: did not start: {log.read_text()}")
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _started(command: Sequence[str], log: IO[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


@contextmanager
def memory_limit(name: str) -> Iterator[Path | None]:
    """A cgroup of LIMIT_BYTES; None where none can be made."""
    for root, limit in _CGROUPS:
        group = Path(root) / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT_BYTES))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            with suppress(OSError):
                group.rmdir()
        return
    yield None


def resident_bytes(process: "subprocess.Popen[str]") -> int:
    """What a server and its models take: the proportional share of each of its processes."""
    every = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    total = 0
    for each in every:
        with suppress(psutil.Error):
            total += each.memory_full_info().pss
    return total


def weights_bytes(bundle: Path) -> int:
    """The size of a bundle's weights."""
    return sum(path.stat().st_size for path in bundle.glob("weights.*.bin"))


def requests() -> list[dict[str, Any]]:
    """Requests of SAMPLES samples, with as many ids for each feature as DLRM-v2's have."""
    random = np.random.default_rng(0)
    return [
        {
            f"f{number}": (
                random.integers(0, min(rows, CAP), SAMPLES * ids),
                np.full(SAMPLES, ids, np.int32),
            )
            for number, (rows, ids) in enumerate(zip(ROWS, IDS, strict=True))
        }
        for _ in range(4)
    ]


class Callers:
    """Callers that ask all the time. The first answer of a version to a request is what all others have to be."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._requests = requests()
        self._small = {name for name, rows in zip(self._requests[0], ROWS, strict=True) if rows <= SMALL}
        self._known: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._seen, self._lock, self._ended = Seen(), threading.Lock(), threading.Event()
        self._kept = 0
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(2)]

    def __enter__(self) -> "Callers":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for each in self._threads:
            each.join()

    def seen(self) -> Seen:
        """What they met since the last time."""
        with self._lock:
            seen, self._seen = self._seen, Seen()
            return seen

    def refused(self) -> int:
        """How many requests were refused since `seen` was called."""
        return self._seen.errors.total()

    def answered(self, version: int) -> int:
        """How many requests a version answered since `seen` was called."""
        return self._seen.answers[version]

    def kept(self) -> int:
        """How many requests for the router's own tables were answered so far."""
        return self._kept

    def _ask(self, number: int) -> None:
        with LookupClient(self._address, MODEL, 5, retries=Retries(attempts=1)) as client:
            while not self._ended.is_set():
                for index, request in enumerate(self._requests):
                    small = number == 1 and index % 2 == 1
                    asked = {each: request[each] for each in self._small} if small else request
                    self._one(client, index, asked, small)
                    time.sleep(PAUSE_S)

    def _one(self, client: LookupClient, index: int, request: Mapping[str, Any], small: bool) -> None:
        started = time.monotonic()
        try:
            answer = client.lookup(request)
        except ServingError as error:
            with self._lock:
                self._seen.errors[str(error)] += 1
            return
        with self._lock:
            known = self._known.setdefault((answer.version, index + 100 * small), answer)
            is_same = all(np.array_equal(answer[name].view(np.uint32), known[name].view(np.uint32)) for name in known)
            self._seen.answers[answer.version] += 1
            self._seen.wrong += not is_same
            self._seen.took_s.append(time.monotonic() - started)
            self._kept += small


def wait_for(holds: Any, what: str) -> float:
    """Until something holds; how long it took, in seconds."""
    started = time.monotonic()
    while not holds():
        if time.monotonic() > started + PATIENCE_S:
            raise SystemExit(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - started


def tell(*arguments: str) -> None:
    """Run `tbe-export` or `tbe-serve`."""
    subprocess.run([sys.executable, "-m", *arguments], check=True, stdout=subprocess.DEVNULL)


def release(repository: Path, model: str, *versions: int) -> None:
    """Have the servers of a repository serve these versions."""
    tell("export", "release", str(repository / model), *map(str, versions))


def run(places: Sequence[Place], router: Place, where: str) -> None:
    """The demo, once there are places."""
    report, repository = Report(), FOLDER / "published"
    report.say("# DLRM-v2's tables on four hosts")
    report.step("Export")
    bundle = export(repository, 1)
    folders = [FOLDER / f"host-{host}" for host in range(HOSTS)]
    own = FOLDER / "router"
    models = [f"{MODEL}-host-{host}" for host in range(HOSTS)]
    for folder, model in zip([*folders, own], [*models, MODEL], strict=True):
        shutil.copytree(repository / model, folder / model)
        release(folder, model, 1)
    sizes = [weights_bytes(folder / model / "1") for folder, model in zip(folders, models, strict=True)]
    own_bytes = weights_bytes(bundle)
    report.say(
        f"{len(ROWS)} tables, dim {DIM}, INT4, generated rows: at most {CAP:,} of the 40,000,000 of the largest, "
        f"{sum(min(rows, CAP) for rows in ROWS):,} in all. "
        f"On hosts: {', '.join(f'{size / 1e6:.0f} MB' for size in sizes)}. "
        f"Tables of up to {SMALL:,} rows, {own_bytes / 1e6:.0f} MB, are in the router."
    )
    with ExitStack() as stack:
        report.step("Serve")
        groups = [stack.enter_context(memory_limit(f"tbe-demo-{os.getpid()}-{host}")) for host in range(HOSTS)]
        servers = [
            stack.enter_context(served(folder, place, group))
            for folder, place, group in zip(folders, places, groups, strict=True)
        ]
        hosts = [part for host, place in enumerate(places) for part in ("--host", f"{host}={place.address}:8401")]
        tell("serving", "configure", str(own / MODEL), *hosts, "--instances", "2")
        routing = stack.enter_context(served(own, router, None))
        report.say(f"Four hosts and a router, {where}.")
        callers = stack.enter_context(Callers(f"{router.address}:8401"))
        time.sleep(5)
        report.say(f"Lookups of {SAMPLES} samples, {SAMPLES * sum(IDS):,} ids: {callers.seen().line()}.")
        report.say("")
        report.say("| server | memory (PSS) | limit | its tables |")
        report.say("|---|---|---|---|")
        for host, (server, group, size) in enumerate(zip(servers, groups, sizes, strict=True)):
            limit = f"{LIMIT_BYTES / 1e6:.0f} MB (cgroup)" if group else "none: no cgroup can be made here"
            report.say(f"| host {host} | {resident_bytes(server) / 1e6:.0f} MB | {limit} | {size / 1e6:.0f} MB |")
        report.say(f"| router | {resident_bytes(routing) / 1e6:.0f} MB | none | {own_bytes / 1e6:.0f} MB |")
        report.step("Kill a host")
        kept = callers.kept()
        (triton,) = psutil.Process(servers[0].pid).children()
        triton.kill()
        wait_for(callers.refused, "a lookup notices")
        time.sleep(0.2)
        lost = callers.seen()
        wait_for(lambda: callers.answered(1) > 20 + callers.kept() - kept, "lookups are answered again")
        back = callers.seen()
        (said, _), *_ = lost.errors.most_common()
        report.say(f"Lookups that need it are refused: `{said}`.")
        refused = (lost.errors + back.errors).total()
        report.say(
            f"Meanwhile {callers.kept() - kept:,} lookups of the router's tables were answered. `tbe-serve run` "
            f"started the host anew: {refused:,} lookups were refused, {lost.wrong + back.wrong} answers were wrong."
        )
        report.step("Roll out version 2")
        began = time.monotonic()
        export(repository, 2)
        exported_s = time.monotonic() - began
        for folder, model in zip([*folders, own], [*models, MODEL], strict=True):
            shutil.copytree(repository / model / "2", folder / model / "2")
        callers.seen()
        for folder, model in zip(folders, models, strict=True):
            release(folder, model, 1, 2)
        for place, model in zip(places, models, strict=True):
            wait_for(lambda place=place, model=model: 2 in _versions(place, model), f"{model} 2")
        release(own, MODEL, 2)
        wait_for(lambda: callers.answered(2), "the router's version 2")
        time.sleep(5)
        for folder, model in zip(folders, models, strict=True):
            release(folder, model, 2)
        time.sleep(5)
        report.say(
            f"Exported in {exported_s:.0f} s. Hosts loaded it beside version 1, then the router, then the hosts "
            "unloaded version 1."
        )
        report.say(f"Meanwhile: {callers.seen().line()}. Every answer is all of one version.")
    report.say(f"\n{time.monotonic() - report.began:.0f} s in all.")
    PAGE.write_text("\n".join(report.lines) + "\n")
    print(f"The page: {PAGE}")


def _versions(place: Place, model: str) -> set[int]:
    """The versions of a host's model that answer."""
    found = set()
    for version in (1, 2):
        with grpc.insecure_channel(f"{place.address}:8401") as channel, suppress(grpc.RpcError):
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            asked = pb.ModelReadyRequest(name=model, version=str(version))
            if stub.ModelReady(asked, timeout=5).ready:
                found.add(version)
    return found


def main() -> None:
    """Make machines where root allows it, and run the demo on them. SIGTERM removes them, too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    if os.geteuid() != 0:
        print("not root: servers run on loopback addresses, without namespaces of their own")
        places = [Place(f"127.0.0.{2 + host}") for host in range(HOSTS)]
        run(places, Place("127.0.0.1"), "on loopback addresses of one machine")
        return
    with lan(1 + HOSTS) as network:
        machines = json.dumps([[each.name, each.address] for each in network.machines])
        command = [*network.machines[0].within, sys.executable, "-m", "examples.hosts.demo", network.bridge, machines]
        with subprocess.Popen(command) as process:
            try:
                code = process.wait()
            finally:
                process.terminate()
    raise SystemExit(code)


def on_machines(bridge: str, machines: str) -> None:
    """The demo, in a process on the first of some machines."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    network = Lan(bridge, [Machine(*each) for each in json.loads(machines)])
    places = [Place(each.address, each.within) for each in network.machines[1:]]
    run(places, Place("127.0.0.1"), "each in a network namespace of its own")


if __name__ == "__main__":
    if sys.argv[1:]:
        on_machines(*sys.argv[1:])
    else:
        main()
