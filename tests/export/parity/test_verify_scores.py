"""`tbe-export verify` and `inspect` of a bundle with scores."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from export import ExportConfig, export_model
from serving.bundle.load import digest_file
from serving.bundle.scores import ITEMS_PROGRAM, USER_PROGRAM
from tests.support.commands import tbe_export
from tests.support.ranker import Ranker, mixing, ranker, ranker_of_ids

GIVEN = ("--model", "tests.support.ranker:ranker")


def other_head() -> Ranker:
    """The same tables, and other weights behind them."""
    module = ranker()
    with torch.no_grad():
        module.top.weight[0, 0] += 0.01
    return module


def other_answers() -> Ranker:
    """The same tables, and another width of an input."""
    module = ranker()
    module.of_user = torch.nn.Linear(5, 4)
    return module


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models by name: `ranker`, `of_ids`, and `mixing`, whose scores of a sample depend on the others."""
    repository = tmp_path_factory.mktemp("scored") / "r"
    for name, module in (("ranker", ranker()), ("of_ids", ranker_of_ids()), ("mixing", mixing())):
        export_model(module, repository, name, ExportConfig(scores=True))
    return repository


@pytest.fixture
def repository(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "r"))


def replace_scores(bundle: Path, other: Path, names: Sequence[str] = ("scores.pt", "scores.pt2")) -> None:
    """Give a bundle the dense part of another, and have its manifest agree, as a publisher could."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    for name in names:
        shutil.copy(other / name, bundle / name)
        digest = digest_file(bundle / name)
        manifest["files"][name] = {"size_bytes": digest.size_bytes, "sha256": digest.sha256}
    (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["ranker", "of_ids", "mixing"])
def test_a_good_bundle_is_verified_with_its_scores(repository: Path, name: str) -> None:
    done = tbe_export("verify", str(repository / name / "1"))
    assert (done.exit_code, done.stderr) == (0, "")
    assert "largest error of a score" in done.stdout
    assert ("requests are scored one by one" in done.stdout) == (name == "mixing")


def refused(bundle: Path, *options: str) -> str:
    """The only line that `tbe-export verify` says of a bundle that it refuses."""
    done = tbe_export("verify", str(bundle), *options)
    assert done.exit_code == 1
    said: list[str] = done.stderr.splitlines()
    assert len(said) == 1
    return said[0]


def test_scores_are_compared_with_those_of_the_model(repository: Path, tmp_path: Path) -> None:
    bundle = repository / "ranker" / "1"
    done = tbe_export("verify", str(bundle), *GIVEN, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    outputs = json.loads(done.stdout)["dense_part"]["outputs"]
    assert [output["name"] for output in outputs] == ["like", "both"]
    assert all(0 < output["parity"]["trained_mean"] <= output["parity"]["trained"] < 0.1 for output in outputs)

    said = refused(bundle, "--model", "tests.export.parity.test_verify_scores:other_head")
    assert said.startswith("tbe-export: output 'like': differs by ")
    assert said.endswith("is this the model that was exported?")

    torch.save(ranker().state_dict(), tmp_path / "good.pt")
    torch.save(other_head().state_dict(), tmp_path / "other.pt")
    done = tbe_export("verify", str(bundle), *GIVEN, "--checkpoint", str(tmp_path / "good.pt"))
    assert (done.exit_code, done.stderr) == (0, "")
    assert "output 'like': differs by " in refused(bundle, *GIVEN, "--checkpoint", str(tmp_path / "other.pt"))


def test_a_model_with_other_inputs_is_not_what_was_exported(repository: Path) -> None:
    said = refused(repository / "ranker" / "1", "--model", "tests.export.parity.test_verify_scores:other_answers")
    assert "expected a model with the dense inputs and outputs of this bundle, " in said


def test_scores_that_a_merged_request_changes_are_found(repository: Path) -> None:
    """The manifest says that samples are not mixed, and they are."""
    bundle = repository / "of_ids" / "1"
    replace_scores(bundle, repository / "mixing" / "1")
    assert "output 'scores': scores of merged requests differ from those of each request alone by " in refused(bundle)


def test_a_dense_file_that_answers_differently_is_found(repository: Path) -> None:
    bundle = repository / "of_ids" / "1"
    replace_scores(bundle, repository / "mixing" / "1", ["scores.pt2"])
    assert "output 'scores': scores.pt2 differs by " in refused(bundle)


def test_scores_of_another_bundle_are_found(repository: Path) -> None:
    bundle = repository / "of_ids" / "1"
    replace_scores(bundle, repository / "ranker" / "1")
    assert "scores.pt: cannot score: " in refused(bundle)


@pytest.fixture(scope="module")
def with_user_side(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranker whose user side is `x` and `user`, and one with other weights above the tables, `other`."""
    repository = tmp_path_factory.mktemp("user_side") / "r"
    for name, module in (("ranker", ranker()), ("other", other_head()), ("narrow", other_answers())):
        export_model(module, repository, name, ExportConfig(scores=True, user_side=["x", "user"]))
    return repository


def test_the_programs_of_the_user_side_are_verified(with_user_side: Path) -> None:
    done = tbe_export("verify", str(with_user_side / "ranker" / "1"), *GIVEN)
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("other", "scores.user.pt and scores.items.pt: output 'like' is off by "),
        ("narrow", "scores.items.pt: cannot score: "),
    ],
)
def test_user_side_programs_of_another_bundle_are_found(
    with_user_side: Path, tmp_path: Path, name: str, why: str
) -> None:
    bundle = Path(shutil.copytree(with_user_side, tmp_path / "r")) / "ranker" / "1"
    replace_scores(bundle, with_user_side / name / "1", [USER_PROGRAM, ITEMS_PROGRAM])
    assert why in refused(bundle)


def test_inspect_shows_inputs_outputs_and_score_errors(repository: Path) -> None:
    done = tbe_export("inspect", str(repository / "ranker" / "1"))
    assert done.exit_code == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "[B]" in rows["like"]
    assert "[B, 2]" in rows["both"]
    size = (repository / "ranker" / "1" / "scores.pt").stat().st_size
    assert rows["scores.pt:"].endswith(
        f"{size / 1000:.1f} kB, FP32 weights, takes embeddings, user [B, 3], item [B, 2]"
    )
    assert rows["scores.pt2:"].endswith(" times its time")
    assert "requests are scored one by one" not in done.stdout
    assert "requests are scored one by one" in tbe_export("inspect", str(repository / "mixing" / "1")).stdout
    assert json.loads(tbe_export("inspect", str(repository / "mixing" / "1"), "--json").stdout)["dense_part"][
        "mixes_samples"
    ]
