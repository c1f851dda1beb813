"""The status of a server on this machine: what it serves, its memory, and what happened to it."""

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from serving.bundle.load import open_bundle, versions
from serving.bundle.manifest import WEIGHTS_FILES
from serving.errors import ServingError
from serving.files import Strict
from serving.model.config_file import of_json, settings_of
from serving.model.settings import ServingSettings
from serving.router.hosts_config import hosts_of
from serving.router.replicas import HostReplicas, replicas_of
from serving.server.run_file import Recovery, RunFile
from serving.tables.huge_page_copy import COPY_PREFIX
from serving.tables.mutable_tables import LIVE_PREFIX, state_of
from serving.tables.pages import cached, huge_bytes_of
from serving.triton.control import NEWEST, UNLOADED, Control, VersionState, metrics_page, replaced_policy
from serving.triton.stubs import Stub, living_stubs

_WEIGHTS = re.compile(
    rf"^([0-9a-f]+)-([0-9a-f]+) .*/(?:weights\.\d+\.bin|{COPY_PREFIX}[0-9a-f]{{64}}|{LIVE_PREFIX}[0-9a-f-]+)$",
    re.MULTILINE,
)
_SERIES = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LIVE = re.compile(rf"(/\S*/{LIVE_PREFIX}[0-9a-f-]+)$", re.MULTILINE)


class ProcessMemory(Strict, frozen=True):
    """The memory of a process, in bytes.

    Attributes:
        resident: pages of the process in memory, including shared pages (RSS).
        share: the same, but a page that N processes use counts 1/N (PSS). The shares of all processes add up to the
            memory that they use together.
        mapped: the weights files that the process has mapped, whether they are in memory or not.
        huge: the part of files and shared copies that is mapped in huge pages.
    """

    resident: int
    share: int
    mapped: int
    huge: int


def process_memory(pid: int) -> ProcessMemory | None:
    """The memory of a process, or None if it has ended or belongs to another user."""
    process = Path("/proc") / str(pid)
    try:
        rollup = (process / "smaps_rollup").read_text(errors="surrogateescape")
        maps = (process / "maps").read_text(errors="surrogateescape")
    except OSError:
        return None
    kib = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", rollup, re.MULTILINE)}
    return ProcessMemory(
        resident=kib["Rss"] << 10,
        share=kib["Pss"] << 10,
        mapped=sum(int(end, 16) - int(start, 16) for start, end in _WEIGHTS.findall(maps)),
        huge=huge_bytes_of(rollup),
    )


class InstanceStatus(Strict, frozen=True):
    """An instance of a version: a process. `memory` is None if it has just ended."""

    process: int
    is_busy: bool
    memory: ProcessMemory | None


class DeltasStatus(Strict, frozen=True):
    """The deltas in the live copy of a version.

    Attributes:
        sequence: the number of the newest applied delta.
        rows: the number of rows written so far.
        stopped: why no further delta is applied; empty if deltas are applied.
    """

    sequence: int
    rows: int
    stopped: str


class Kernels(Strict, frozen=True):
    """The kernels that FBGEMM looks rows up with.

    Attributes:
        instruction_set: the instruction set that the kernels use, such as "avx2".
        are_slow: whether the processor has vector instructions that the kernels do not use.
    """

    instruction_set: str
    are_slow: bool


class Programs(Strict, frozen=True):
    """The programs of a model's process.

    Attributes:
        lookup: "torchscript", or "plain" for a module built from the manifest.
        scores: the format of the dense part: "torchscript", "exported_program" or "aotinductor"; empty without
            scores.
    """

    lookup: str
    scores: str


class VersionStatus(Strict, frozen=True):
    """A version that a server has loaded, or tried to load.

    Attributes:
        version: the number of the version.
        state: "READY", "LOADING", "UNLOADING" or "UNAVAILABLE".
        reason: why it does not serve; empty if it serves, or if Triton gives no reason.
        instances: its running processes.
        weights_bytes: the size of its weights files, or None if no process has mapped them.
        cached_bytes: the part of them in the page cache, which all processes share, or None if unknown.
        kernels: the kernels of FBGEMM, or None if no process serves the version or tritonserver has no metrics yet.
        programs: the different programs that its processes have used since tritonserver was started; empty if
            `kernels` is None.
        hosts: for a router, the hosts of its plan and their replicas.
        deltas: the deltas in its live copy, or None without a live copy.
    """

    version: int
    state: str
    reason: str
    instances: tuple[InstanceStatus, ...]
    weights_bytes: int | None
    cached_bytes: int | None
    kernels: Kernels | None = None
    programs: tuple[Programs, ...] = ()
    hosts: tuple[HostReplicas, ...] = ()
    deltas: DeltasStatus | None = None


class ModelStatus(Strict, frozen=True):
    """A model of a server.

    Attributes:
        name: the name of the model.
        chosen_by: how its versions were chosen: by "pin" (`--serve`), "release" (`--follow`), "load" (`tbe-serve load
            --version`) or "config".
        versions: the versions that were not unloaded, oldest first.
        settings: its settings, as `tbe-serve configure` explains them; empty if no version serves.
    """

    name: str
    chosen_by: str
    versions: tuple[VersionStatus, ...]
    settings: dict[str, Any]


class Status(Strict, frozen=True):
    """The status of a server: what it serves, its memory, and what happened since it was started.

    Attributes:
        address: the gRPC address of the server.
        triton: the version of tritonserver.
        process: the process id of tritonserver.
        memory: the memory of tritonserver itself.
        models: the models, by name.
        recoveries: how often a model was loaded again or tritonserver started again.
        last_recovery: the last recovery, or None.
        drains_until: when a draining server stops at the latest, in Unix time; None if it does not drain.
    """

    address: str
    triton: str
    process: int
    memory: ProcessMemory | None
    models: tuple[ModelStatus, ...]
    recoveries: int
    last_recovery: Recovery | None
    drains_until: float | None = None


def status_of(run: RunFile, timeout_s: float) -> Status:
    """The status of a server on this machine.

    Args:
        run: the content of the server's run file.
        timeout_s: the deadline of each call to the server, in seconds.

    Raises:
        ServingError: the server does not answer.
    """
    control = Control(address=run.control, key=run.key, timeout_s=timeout_s)
    index = [entry for entry in control.index() if entry.reason != UNLOADED]
    stubs = list(living_stubs(run.process))
    gauges = _gauges(run.metrics, timeout_s)
    names = sorted({entry.model for entry in index})
    return Status(
        address=run.grpc,
        triton=control.server_version(),
        process=run.process,
        memory=process_memory(run.process),
        models=tuple(_model(name, index, stubs, gauges, run, control) for name in names),
        recoveries=run.recoveries,
        last_recovery=run.last_recovery,
        drains_until=run.drains_until,
    )


class _Gauges(NamedTuple):
    """What the labels of a version's metrics say."""

    kernels: Kernels | None = None
    programs: tuple[Programs, ...] = ()


def _gauges(metrics: str, timeout_s: float) -> Mapping[tuple[str, int], _Gauges]:
    """The kernels and programs of each version, by model and version. Empty while tritonserver has no metrics."""
    try:
        page = metrics_page(metrics, timeout_s).decode()
    except ServingError:
        return {}
    gauges: defaultdict[tuple[str, int], _Gauges] = defaultdict(_Gauges)
    for name, text, value in _SERIES.findall(page):
        if name not in ("tbe_slow_kernels", "tbe_programs"):
            continue
        labels = dict(_LABEL.findall(text))
        version = labels["model"], int(labels["version"])
        kernels, programs = gauges[version]
        if name == "tbe_slow_kernels":
            kernels = Kernels(labels["instruction_set"], bool(float(value)))
        else:
            programs = (*programs, Programs(labels["lookup"], labels["scores"]))
        gauges[version] = _Gauges(kernels, programs)
    return gauges


def _model(
    name: str,
    index: Iterable[VersionState],
    stubs: Sequence[Stub],
    gauges: Mapping[tuple[str, int], _Gauges],
    run: RunFile,
    control: Control,
) -> ModelStatus:
    states = sorted((entry for entry in index if entry.model == name), key=lambda entry: entry.version)
    ready = {state.version for state in states if state.state == "READY"}
    config = control.config(name) if ready else None
    settings = None if config is None else settings_of(of_json(config))
    shown = {} if settings is None else asdict(settings)
    shown.pop("version", None)  # it only says how a running server loaded the model
    return ModelStatus(
        name=name,
        chosen_by=_chosen_by(name, ready, config, run),
        versions=tuple(
            _version(state, stubs, gauges.get((name, state.version), _Gauges()), settings) for state in states
        ),
        settings=shown,
    )


def _chosen_by(name: str, ready: set[int], config: Any, run: RunFile) -> str:
    """How the `ready` versions of a model were chosen. `config`: its ModelConfig, or None if no version is ready."""
    if name in run.released:
        return "release"
    if name in run.pinned:
        return "pin" if ready <= {*run.pinned[name]} else "load"
    if config is None or (instead_of := replaced_policy(config)) is None:
        return "config"
    newest = versions(Path(run.repository) / name)[-1:]
    configured = newest if instead_of == NEWEST else [int(instead_of)]
    return "config" if ready == {*configured} else "load"


def _version(
    state: VersionState, stubs: Iterable[Stub], gauges: _Gauges, settings: ServingSettings | None
) -> VersionStatus:
    own_stubs = [stub for stub in stubs if (stub.model, stub.version) == (state.model, state.version)]
    weights = sorted(own_stubs[0].bundle.glob(WEIGHTS_FILES)) if own_stubs else []
    size = sum(map(_size_bytes, weights))
    pages = [cached(path) for path in weights]
    cached_size = None if None in pages else sum(pages.size for pages in pages if pages is not None)
    return VersionStatus(
        version=state.version,
        state=state.state,
        reason=state.reason,
        instances=tuple(
            InstanceStatus(process=stub.process.pid, is_busy=stub.is_busy(), memory=process_memory(stub.process.pid))
            for stub in own_stubs
        ),
        weights_bytes=size if own_stubs else None,
        cached_bytes=min(size, cached_size) if own_stubs and cached_size is not None else None,
        kernels=gauges.kernels if own_stubs else None,
        programs=gauges.programs if own_stubs else (),
        hosts=_hosts(own_stubs[0].bundle, settings) if own_stubs and settings is not None and settings.hosts else (),
        deltas=_deltas(own_stubs[0].process.pid) if own_stubs else None,
    )


def _deltas(process: int) -> DeltasStatus | None:
    """The deltas in the live copy that a model's process has mapped, or None without one."""
    with suppress(OSError):
        for path in _LIVE.findall((Path("/proc") / str(process) / "maps").read_text(errors="surrogateescape")):
            with state_of(Path(path)) as state:
                return DeltasStatus(sequence=state.sequence, rows=state.rows, stopped=state.stopped)
    return None


def _hosts(bundle: Path, settings: ServingSettings) -> tuple[HostReplicas, ...]:
    """The hosts of a router's bundle; empty if the bundle cannot be read, or the settings do not fit it."""
    try:
        return asyncio.run(replicas_of(open_bundle(bundle).manifest, hosts_of(settings)))
    except (ServingError, KeyError):
        return ()


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
