"""Export on several machines: each publishes the bundles of some hosts, and the last one the router's bundle."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from torch import nn

from export.config import ExportConfig, Progress
from export.pipeline import Export
from export.prepare import prepare
from export.trained.checkpoint import WeightSource
from serving.errors import ConfigurationError


def export_hosts(
    module: nn.Module,
    repository: Path | str,
    name: str,
    hosts: Iterable[int],
    config: ExportConfig,
    version: int,
    *,
    checkpoint: WeightSource = None,
    signing_key: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> list[Path]:
    """Publish the bundles of some hosts of a plan. Only their rows of the checkpoint are read.

    Every machine must make the same plan: give all of them the same config, with `memory_bytes` if the planner
    decides. The bundles are used only after `complete_hosts` has published the router's.

    Args:
        hosts: the numbers of the hosts in the plan.
        config: what to export, with `hosts_as_models`.
        version: the number of all bundles of the set.

    All other arguments are those of `export.export_model`.

    Returns:
        The paths of the bundles.

    Raises:
        ConfigurationError: the plan has no such host, or its hosts are not models.
        ExportError: as `export_model`.
    """
    return _export(module, repository, name, config, checkpoint, signing_key, progress).publish_parts(hosts, version)


def complete_hosts(
    module: nn.Module,
    repository: Path | str,
    name: str,
    config: ExportConfig,
    version: int,
    *,
    checkpoint: WeightSource = None,
    signing_key: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Publish the router's bundle after the bundles of all hosts. Only the router's own rows are read.

    Every file of the hosts' bundles is compared with its digest.

    Args:
        config: the config of the hosts' exports.
        version: the number of all bundles of the set.

    All other arguments are those of `export.export_model`.

    Returns:
        The path of the router's bundle.

    Raises:
        ConfigurationError: the hosts of the plan are not models.
        PublishError: a line for each host whose bundle is missing, damaged, or part of another plan.
        ExportError: as `export_model`.
    """
    hosts = _export(module, repository, name, config, checkpoint, signing_key, progress)
    return hosts.complete(version)


def _export(
    module: nn.Module,
    repository: Path | str,
    name: str,
    config: ExportConfig,
    checkpoint: WeightSource,
    signing_key: Path | None,
    progress: Callable[[Progress], None],
) -> Export:
    if not config.sharding.hosts_as_models:
        raise ConfigurationError("sharding: expected --hosts-as-models: otherwise a bundle has all hosts")
    # A machine reads only its own rows, unless `trained_memory_bytes` allows it to load all of them to run the model.
    config = replace(config, trained_memory_bytes=config.trained_memory_bytes or 0)
    return Export(prepare(module, config, checkpoint, signing_key, progress), Path(repository), name)
