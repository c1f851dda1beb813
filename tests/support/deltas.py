"""The deltas that a test has published."""

from pathlib import Path

from serving.bundle.lineage import steps_in


def listed(folder: Path) -> list[int]:
    """The numbers of the deltas in a lineage's folder that are not squashed, in order."""
    return [step.sequence for step in steps_in(folder) if not step.is_squashed]
