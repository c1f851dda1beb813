"""The files of a base: what replaces an earlier one, and what is said about it."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from export.errors import PublishError
from export.kubernetes.base import KUSTOMIZATION, base_files, write_base
from export.kubernetes.fleet import read_fleet
from tests.export.kubernetes.conftest import OPTIONS, options_for
from tests.support.commands import tbe_export


def test_a_later_base_replaces_only_an_earlier_one(published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "k8s"
    router, model = (read_fleet(published / name / "1", OPTIONS) for name in ("Movies_V2", "m"))
    write_base(folder, router, base_files(router, OPTIONS))
    assert (folder / "host-1.yaml").exists()
    fewer = {name: text for name, text in base_files(router, OPTIONS).items() if name != "host-1.yaml"}
    write_base(folder, router, fewer)
    assert not (folder / "host-1.yaml").exists()
    with pytest.raises(PublishError, match="found other files"):
        write_base(folder, model, base_files(model, OPTIONS))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.yaml").touch()
    with pytest.raises(PublishError, match="expected no such folder, an empty one, or an earlier base for 'm'"):
        write_base(tmp_path / "other", model, base_files(model, OPTIONS))


def test_changed_options_of_a_later_run_are_reported(configured: Path, tmp_path: Path) -> None:
    """Pods would be fewer, and unsigned bundles served, without a word."""
    out = tmp_path / "k8s"

    def said(*more: str) -> list[str]:
        done = tbe_export("manifests", str(configured), *options_for(out, *more))
        assert done.exit_code == 0, done.stderr
        return [str(line).removeprefix("tbe-export: changed: ") for line in done.stderr.splitlines()]

    assert said("--routers", "3", "--replicas-of", "1=3", "--copy", "--metrics-from", "watch") == []
    assert said("--routers", "3", "--replicas-of", "1=3", "--copy", "--metrics-from", "watch") == []
    assert said() == [
        "--routers: 3 before, now 2",
        "--replicas-of 1: 3 before, now 2",
        "--copy: yes before, now no",
        "--metrics-from: watch before, now monitoring",
    ]
    assert said() == []
    assert said("--replicas", "4", "--hosts-also", "1", "--scale-on-queue-ms", "9") == [
        "--scale-on-queue-ms: none before, now 9",
        "--replicas-of 0: 2 before, now 4",
        "--replicas-of 1: 2 before, now 4",
        "--hosts-also: none before, now 1",
    ]
    text = (out / "kustomization.yaml").read_text()
    assert yaml.safe_load(text)["kind"] == "Kustomization"
    (out / "kustomization.yaml").write_text(text.replace('{"--routers"', "{--routers"))
    assert said() == []


@pytest.mark.parametrize("store", ["s3://b/a\u2028namespace: kube-system #", "s3://a\x85b/m", "s3://b/a\u2029b"])
def test_a_comment_ends_at_no_character_of_an_option(published: Path, store: str) -> None:
    """YAML ends lines at more characters than \\n."""
    options = replace(OPTIONS, claim=None, store=store)
    fleet = read_fleet(published / "m" / "1", options)
    kustomization = yaml.safe_load(base_files(fleet, options)[KUSTOMIZATION])
    assert sorted(kustomization) == ["apiVersion", "kind", "resources"]


@pytest.mark.parametrize("claim", ["1e3", "0o17", "y"])
def test_names_that_yaml_1_2_reads_as_numbers_are_quoted(published: Path, claim: str) -> None:
    options = replace(OPTIONS, claim=claim)
    text = base_files(read_fleet(published / "m" / "1", options), options)["lookup.yaml"]
    assert f"claimName: '{claim}'\n" in text
