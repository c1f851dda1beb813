"""`tbe-export complete`: publish a router's bundle, when those of its hosts are there."""

from pathlib import Path
from typing import Annotated

import typer

from export.commands.module import CheckpointOption, ModelOption, SigningKeyOption, build_module
from export.commands.progress import export_progress
from export.commands.settings import Config, takes_settings
from export.commands.show import show_parity, show_published, show_remarks, show_scores
from serving.bundle.opening import open_bundle
from serving.pins import check_pins


@takes_settings
def complete(
    model: ModelOption,
    repository: Annotated[Path, typer.Option(help="Triton's model repository, with the bundles of all hosts.")],
    name: Annotated[str, typer.Option(help="The router's name in the repository.")],
    version: Annotated[int, typer.Option(help="The number of all bundles of the set.")],
    config: Config,
    checkpoint: CheckpointOption = None,
    signing_key: SigningKeyOption = None,
) -> None:
    """Publish the router's bundle for hosts that `tbe-export model --only-hosts` exported, with the same options.

    The bundles of all hosts are read and compared with their digests. What is missing is said, a line for each host.
    """
    settings = config()
    check_pins()
    from export.hosts.machines import complete_hosts

    module = build_module(model, meta=checkpoint is not None)
    with export_progress() as show:
        path = complete_hosts(
            module,
            repository,
            name,
            settings,
            version,
            checkpoint=checkpoint,
            signing_key=signing_key,
            progress=show,
        )
    manifest = open_bundle(path).manifest
    show_parity(manifest.parity)
    show_scores(manifest, manifest.dense_part)
    show_remarks(manifest)
    show_published(path, manifest)
