"""TorchScript against AOTInductor on what follows the tables of a ranker over histories, padded and jagged.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.compilers

Both compile the same graph, which `export_model(…, example=…)` cut out. AOTInductor needs a C++ compiler.
"""

import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Result, interleave, p50, ratio_of
from benchmarks.sequences_workload import OUTPUT, SequencesWorkload
from export import ExportConfig, export_model
from serving.engine import Engine
from serving.torchscript import torchscript

SIZES = {1: 64, 7: 32, 128: 16}
ROUNDS = {1: 300, 7: 200, 128: 60}
REPEATS, PAUSE_S, COLD_ROUNDS = 5, 0.005, 150
# Instructions: those of this machine, or those that all x86-64-v3 have.
MARCHES = {"native": ("native", None), "v3": ("x86-64-v3", 256)}


def main() -> None:
    """Print what each takes, and TorchScript ÷ AOTInductor."""
    torch.set_num_threads(1)
    workload = SequencesWorkload.make(SIZES)
    with tempfile.TemporaryDirectory() as folder:
        for form, model in {"padded": workload.model, "jagged": workload.jagged()}.items():
            graphs: list[Any] = []
            script = torch.jit.script

            def record(graph: Any, *args: Any, graphs: list[Any] = graphs, script: Any = script, **named: Any) -> Any:
                if isinstance(graph, torch.fx.GraphModule):
                    graphs.append(graph)
                return script(graph, *args, **named)

            torch.jit.script = record  # type: ignore[assignment]
            bundle = export_model(
                model, Path(folder) / form, "m", ExportConfig(scores=True), example=workload.example()
            )
            torch.jit.script = script
            calls = _calls(Engine.open(bundle), workload)
            for result in _compared(form, bundle, graphs[0], calls, Path(folder)):
                print(f"{result.name}: {result.shown}", flush=True)


def _calls(engine: Engine, workload: SequencesWorkload) -> dict[int, list[tuple[Tensor, ...]]]:
    """What the dense part is given for the requests, by their number of samples."""
    calls: list[tuple[Tensor, ...]] = []
    assert engine._dense is not None
    forward = engine._dense._forward

    def forward_and_record(*inputs: Tensor) -> Any:
        calls.append(tuple(tensor.clone() for tensor in inputs))
        return forward(*inputs)

    engine._dense._forward = forward_and_record
    calls_by_samples = {}
    for samples in SIZES:
        calls.clear()
        for tensors in workload.tensors(samples):
            answer = engine.outputs(tensors)[OUTPUT]
            np.testing.assert_allclose(answer, workload.eager(tensors), rtol=0, atol=0.3)
        # Tensors that are made in inference mode cannot be traced.
        calls_by_samples[samples] = [tuple(torch.from_numpy(tensor.numpy()) for tensor in inputs) for inputs in calls]
    return calls_by_samples


def _compared(form: str, bundle: Path, graph: Any, calls: Any, folder: Path) -> Any:
    with torchscript():
        program = torch.jit.load(str(bundle / "scores.pt")).forward  # type: ignore[no-untyped-call]
    candidates = {"torchscript": program}
    example = calls[7][0]
    dims = tuple(dict.fromkeys(range(tensor.dim() - (tensor.dim() > 1)), torch.export.Dim.AUTO) for tensor in example)
    with torch.no_grad():
        exported = torch.export.export(graph, example, dynamic_shapes=dims)
    for name, (march, simdlen) in MARCHES.items():
        torch._inductor.config.cpp.march = march
        torch._inductor.config.cpp.simdlen = simdlen
        torch._inductor.config.cpp.threads = 1
        started = time.monotonic()
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / f"{form}_{name}.pt2"))
        yield Result(f"{form}_{name}_compile_s", time.monotonic() - started)
        yield Result(f"{form}_{name}_file", Path(path).stat().st_size, unit="B")
        candidates[name] = torch._inductor.aoti_load_package(path)
    for samples, inputs in calls.items():
        for name, run in candidates.items():
            for tensors in inputs:
                assert (run(*tensors)[0] - program(*tensors)[0]).abs().max() < 1e-4, name
        for where, rounds, pause_s in (("", ROUNDS[samples], 0.0), ("cold_", COLD_ROUNDS, PAUSE_S))[
            : 1 + (samples == 1)
        ]:
            repeats = []
            for _ in range(REPEATS):
                times = interleave(
                    {n: _asking(run, inputs) for n, run in candidates.items()}, rounds, pause_s=pause_s
                )
                repeats.append({name: p50(seconds) for name, seconds in times.items()})
            for name in candidates:
                yield Result(f"{form}_{name}_{where}b{samples}_s", median(repeat[name] for repeat in repeats))
            for name in MARCHES:
                over = (repeat["torchscript"] / repeat[name] for repeat in repeats)
                yield ratio_of(f"{form}_torchscript_over_{name}_{where}b{samples}", over)


def _asking(run: Callable[..., Any], inputs: list[tuple[Tensor, ...]]) -> Callable[[], Any]:
    endless = cycle(inputs)

    def ask() -> Any:
        with torch.inference_mode():
            return run(*next(endless))

    return ask


if __name__ == "__main__":
    main()
