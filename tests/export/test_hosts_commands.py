"""A router's bundle and those of its hosts, by the commands, and from their files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from export import export_model
from export.__main__ import app
from serving.bundle.load import open_bundle
from serving.engine import Engine
from serving.model.config_file import apply_settings, read_config, settings_of, write_config
from tests.export.test_hosts import CONFIG, MODELS, TYPES, mixed
from tests.support.bundle_reader import exported_table
from tests.support.hosts import MODEL


def configure_hosts(model: Path, hosts: dict[str, str]) -> None:
    config = read_config(model)
    apply_settings(config, replace(settings_of(config), hosts=hosts))
    write_config(model, config)


def test_commands_publish_hosts_and_their_router(tmp_path: Path) -> None:
    toml = tmp_path / "export.toml"
    toml.write_text(
        '[sharding]\nranks = 6\nranks_per_host = 2\nmemory_per_rank = "1MB"\nhosts_as_models = true\n'
        + "types = "
        + json.dumps(TYPES).replace(":", " =")
        + "\n[dtype]\nuser = 'int8'\n"
    )
    common = ["--model", f"{mixed.__module__}:{mixed.__name__}", "--repository", str(tmp_path / "r"), "--name", MODEL]
    common += ["--version", "3", "--config", str(toml)]
    runner = CliRunner()
    done = runner.invoke(app, ["model", *common, "--only-hosts", "0,2"])
    assert done.exit_code == 0, done.output
    done = runner.invoke(app, ["publish-router", *common])
    assert done.exit_code == 1
    assert "host 1: " in done.output
    assert runner.invoke(app, ["model", *common, "--only-hosts", "1"]).exit_code == 0
    done = runner.invoke(app, ["publish-router", *common])
    assert done.exit_code == 0, done.output
    assert f"published {tmp_path / 'r' / MODEL / '3'}" in done.output
    configure = f"tbe-serve configure {tmp_path / 'r' / MODEL} --host 0=ADDRESS --host 1=ADDRESS --host 2=ADDRESS"
    assert f"next: serve {', '.join(MODELS[1:])}; then {configure}" in done.output
    model = tmp_path / "r" / MODEL
    again = [*common[:-4], "--version", "4", *common[-2:]]

    def said_next() -> str:
        done = runner.invoke(app, ["model", *again])
        assert done.exit_code == 0, done.output
        shutil.rmtree(model / "4")
        for model_name in MODELS[1:]:
            shutil.rmtree(tmp_path / "r" / model_name / "4")
        return done.output.splitlines()[-1]

    configure_hosts(model, {"0": "a:1", "2": "c:1"})
    assert said_next() == f"next: serve {', '.join(MODELS[1:])}; then tbe-serve configure {model} --host 1=ADDRESS"
    configure_hosts(model, {"0": "a:1", "1": "b:1", "2": "c:1"})
    assert said_next() == f"next: serve version 4 of {', '.join(MODELS[1:])}; then version 4 of {MODEL}"
    for wrong in ("x", "-1", "1,", "0.5"):
        done = runner.invoke(app, ["model", *common, f"--only-hosts={wrong}"])
        assert done.exit_code != 0
        assert "--only-hosts" in done.output
    done = runner.invoke(app, ["model", *common, "--only-hosts=0", "--continue-deltas"])
    assert "--continue-deltas: expected all hosts at once" in done.output


def test_an_engine_on_each_host_s_bundle_answers_its_features(tmp_path: Path) -> None:
    """Each host's bundle, opened alone, answers its own features."""
    router = export_model(mixed(), tmp_path / "r", MODEL, CONFIG)
    random = np.random.default_rng(0)
    for host in open_bundle(router).manifest.hosts:
        bundle = tmp_path / "r" / host.model / "1"
        engine = Engine.open(bundle)
        for feature in engine.bundle.manifest.features:
            ids = random.integers(0, 10, 3).tolist()
            rows = exported_table(bundle, feature.table)[ids].sum(axis=0)
            np.testing.assert_allclose(
                engine.lookup({feature.name: [ids]})[feature.name], [rows], rtol=1e-6, atol=1e-6
            )
