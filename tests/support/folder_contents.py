"""What lies in a folder."""

from pathlib import Path


def files(folder: Path) -> dict[str, bytes]:
    """Everything under `folder`, byte for byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
