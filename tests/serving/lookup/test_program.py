"""The lookup of a bundle: by its TorchScript, or by the same program as a plain module. Answers are the same bits."""

import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from export import ExportConfig, OutputDtype, Sharding, export_model
from export.parity.verify import verify
from serving.bundle.load import digest_of, open_bundle, verify_digests
from serving.bundle.manifest import MANIFEST, PROGRAM, Capability
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import BundleError
from serving.lookup.program import ProgramForm, load_torchscript
from serving.requests.answers import JaggedRows
from serving.server import run_server
from tests.support.bundle_reader import Reader
from tests.support.deadlines import PATIENT_S
from tests.support.leak_check import without_collector
from tests.support.long_cases import one_in
from tests.support.models import MIXED, SUM, Spec, collection, flat, random_bags
from tests.support.no_torchscript import FUNCTIONS, NoTorchScript, remove_torchscript, without_torchscript
from tests.support.sequence_models import POOLED, ROWS, Mixed
from tests.support.servers import FREE, replace_model_py
from tests.support.sharded_exports import sharded

ROW_WISE = Sharding(ranks=3, types={"*": "row_wise"})
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Spec, ...], ExportConfig]] = {
    "one rank, sums and means": (collection, MIXED, ExportConfig()),
    "cut row-wise, weighted": (lambda: collection(MIXED, weighted=True), MIXED, ExportConfig(sharding=ROW_WISE)),
    "sequences": (Mixed, (*POOLED, *ROWS), ExportConfig()),
    "float16": (lambda: collection(SUM), SUM, ExportConfig(output_dtype=OutputDtype.FP16)),
    "cut both ways, float16": (
        collection,
        MIXED,
        ExportConfig(
            output_dtype=OutputDtype.FP16, sharding=Sharding(ranks=4, ranks_per_host=2, types={"*": "grid_shard"})
        ),
    ),
}


def requests(specs: tuple[Spec, ...], *, weighted: bool) -> Iterator[dict[str, Any]]:
    """For all features and for some, in any order, without samples and with empty bags."""
    random = np.random.default_rng(0)
    keys = list(dict.fromkeys(feature for spec in specs for feature in spec.features))
    for samples, features in ((1, None), (17, keys[::-1]), (3, keys[:1]), (0, None)):
        bags = random_bags(random, specs, samples, features)
        if not weighted:
            yield bags
            continue
        weights = {key: random.normal(size=sum(map(len, column))) for key, column in bags.items()}
        yield {key: (*flat({key: column}), weights[key]) for key, column in bags.items()}


def bits(answer: dict[str, Any]) -> dict[str, bytes]:
    return {
        name: (rows.values if isinstance(rows, JaggedRows) else np.asarray(rows)).tobytes()
        for name, rows in answer.items()
    }


@pytest.mark.parametrize("name", one_in(2, MODELS))
def test_answers_are_the_same_bits_without_torchscript(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of a bundle that has TorchScript which torch cannot load, and of one that was exported without."""
    module, specs, config = MODELS[name]
    bundle = export_model(module(), tmp_path / "with", "m", config)
    scripted = Engine.open(bundle)
    assert scripted.lookup_program.form is ProgramForm.TORCHSCRIPT
    assert scripted.lookup_program.failure is None
    remove_torchscript(monkeypatch, NoTorchScript.RAISES)
    unloaded = Engine.open(bundle)
    without = Engine.open(export_model(module(), tmp_path / "without", "m", config))
    for engine in (unloaded, without):
        assert engine.lookup_program.form is ProgramForm.PLAIN
    for request in requests(specs, weighted="weighted" in name):
        expected = bits(scripted.lookup(request))
        assert bits(unloaded.lookup(request)) == expected
        assert bits(without.lookup(request)) == expected


@pytest.mark.usefixtures("no_torchscript")
def test_an_export_without_torchscript_says_so(tmp_path: Path) -> None:
    bundle = export_model(collection(), tmp_path / "r", "m")
    assert not (bundle / PROGRAM).exists()
    manifest = open_bundle(bundle).manifest
    assert Capability.NO_PROGRAM in manifest.requires
    assert any(note.startswith("has no program.pt: TorchScript does not work here: ") for note in manifest.notes)
    for parity in manifest.parity:
        assert parity.scripted is None
        assert parity.reloaded.largest == 0
    engine = Engine.open(bundle)
    assert engine.lookup_program.failure is None
    bags = random_bags(np.random.default_rng(1), MIXED, 4)
    specified = Reader(bundle).lookup(bags)
    for feature, rows in engine.lookup(bags).items():
        np.testing.assert_allclose(rows, specified[feature], rtol=1e-5, atol=1e-5)
    assert verify(bundle).failures == ()


@pytest.mark.parametrize("how", NoTorchScript)
def test_bundles_verify_with_and_without_torchscript(tmp_path: Path, how: NoTorchScript) -> None:
    with_program = export_model(collection(), tmp_path / "with", "m")
    with without_torchscript(how):
        without_program = export_model(collection(), tmp_path / "without", "m")
        assert verify(with_program).failures == ()
    assert verify(without_program).failures == ()
    assert Engine.open(without_program).lookup_program.form is ProgramForm.PLAIN


def test_the_reason_for_not_using_a_program_is_recorded(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_torchscript(monkeypatch, NoTorchScript.RAISES)
    assert Engine.open(mixed).lookup_program.failure == (
        f"{mixed / PROGRAM}: torch {torch.__version__} cannot load it: "
        "RuntimeError: TorchScript is not supported in Python 3.14+"
    )


def test_a_program_that_cannot_be_frozen_is_not_used(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch.jit, "freeze", fail)
    engine = Engine.open(mixed)
    assert engine.lookup_program.form is ProgramForm.PLAIN
    assert (engine.lookup_program.failure or "").endswith("cannot load it: NotImplementedError")


def test_an_unloadable_program_is_served_plain_and_refused_by_verify(mixed: Path, tmp_path: Path) -> None:
    """The manifest names the bytes, so they are the publisher's. They are no program, though TorchScript works."""
    bundle = Path(shutil.copytree(mixed, tmp_path / "m" / "1"))
    (bundle / PROGRAM).write_bytes(b"no program")
    manifest = json.loads((bundle / MANIFEST).read_text())
    digest = digest_of(b"no program")
    manifest["files"][PROGRAM] = {"size_bytes": digest.size_bytes, "sha256": digest.sha256}
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    engine = Engine.open(bundle)
    assert engine.lookup_program.form is ProgramForm.PLAIN
    request = {"user_id": [[3]]}
    assert bits(engine.lookup(request)) == bits(Engine.open(mixed).lookup(request))
    with pytest.raises(BundleError, match=r"program\.pt: torch .* cannot load it: .*: export it again"):
        verify(bundle)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_plain_program_is_freed_with_its_engine(mixed: Path, threads: int) -> None:
    with without_torchscript(), without_collector():
        engine = Engine.open(mixed, threads=threads)
        assert engine.lookup({"user_id": [[3]]})["user_id"].shape == (1, 16)
        weights = weakref.ref(engine.table_files.tensors[0])
        engine.close()
        del engine
        assert weights() is None


def test_a_plan_with_one_rank_is_one_call_for_any_sharding_type(tmp_path: Path) -> None:
    engine = sharded(tmp_path, Sharding(types={"*": "grid_shard"}))
    program, _ = load_torchscript(engine.bundle)
    assert program is not None
    code = program.code
    assert code.count("int_nbit_split_embedding_codegen_lookup_function") <= 1
    assert "permute" not in code
    assert "bucketize" not in code
    assert "index_add" not in code


PUBLISHED = Path(__file__).with_name("published")


@pytest.mark.parametrize("exporter", ["torch_2_13", "torch_2_14"])
def test_a_program_of_either_stack_answers_as_specified(exporter: str) -> None:
    """Bundles of tbe-serving's first format 10, one exported by each stack. Published bundles stay readable."""
    bundle = PUBLISHED / exporter / "1"
    verify_digests(open_bundle(bundle))
    engine = Engine.open(bundle)
    assert engine.lookup_program.failure is None
    assert engine.lookup_program.form is ProgramForm.TORCHSCRIPT
    bags: dict[str, list[list[int]]] = {"user": [[0, 23, 9], []], "friend": [[11], [1, 1]], "word": [[10], [0, 4]]}
    specified = Reader(bundle).lookup(bags)
    for feature, rows in engine.lookup(bags).items():
        np.testing.assert_allclose(rows, specified[feature], rtol=1e-6, atol=1e-6)
    with without_torchscript():
        plain = Engine.open(bundle)
    assert plain.lookup_program.form is ProgramForm.PLAIN
    assert bits(plain.lookup(bags)) == bits(engine.lookup(bags))


def test_serving_answers_in_a_process_without_torchscript_types(mixed: Path) -> None:
    """In a process whose torch.jit lacks the types of TorchScript from the beginning."""
    names = (*FUNCTIONS, "ScriptModule", "ScriptFunction")
    code = (
        f"import serving, torch; [delattr(torch.jit, name) for name in {names!r}]; "
        f"from serving.engine import Engine; engine = Engine.open({str(mixed)!r}); "
        "print(engine.lookup_program.form, engine.lookup({'user_id': [[3]]})['user_id'].shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "plain (1, 16)"


WITHOUT_TORCHSCRIPT = """
import serving, torch

def fail(*_, **__):
    raise RuntimeError("TorchScript is not supported")

for name in ("script", "trace", "freeze", "load", "save"):
    setattr(torch.jit, name, fail)
from serving.backend import TritonPythonModel
"""


def test_a_server_answers_without_torchscript_and_logs_how(repository: Path, mixed: Path, tmp_path: Path) -> None:
    """The model `mixed` has no TorchScript, and `sharded` has."""
    for model in ("mixed", "sharded"):
        shutil.copytree(repository / model, tmp_path / "r" / model)
    replace_model_py(tmp_path / "r" / "mixed" / "1", WITHOUT_TORCHSCRIPT)
    bags = random_bags(np.random.default_rng(3), MIXED, 5)
    with (
        run_server(tmp_path / "r", FREE, log=tmp_path / "log", options=["--log-info=true"]) as server,
        LookupClient(server.grpc, "mixed", timeout_s=PATIENT_S) as client,
    ):
        assert bits(client.lookup(bags)) == bits(Engine.open(mixed).lookup(bags))
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "lookup_program:" in line]
    said = sorted(line.partition("lookup_program: ")[2] for line in lines)
    program = tmp_path / "r" / "mixed" / "1" / PROGRAM
    assert said == [
        f"{program}: torch {torch.__version__} cannot load it: RuntimeError: TorchScript is not supported",
        "rows are looked up by a module built from the manifest, plain",
        "rows are looked up by program.pt, torchscript",
    ]
