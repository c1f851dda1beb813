"""Metrics and warnings about the memory of the weights files."""

from collections.abc import Callable, Mapping
from time import monotonic

from serving.backend.metrics import Families
from serving.tables.table_files import PagesUsed, TableFiles

# Seconds between counts of huge pages. Linux walks all pages to count them, too long for each `publish`.
_PERIOD_S = 15.0
# If a smaller share of the weights files than this is in huge pages, the log says why.
_FEW = 0.9


class PageMetrics:
    """How many bytes of the weights files are mapped, and how many of these in huge pages.

    It also has the files read into memory (`TableFiles.populate`), so that it can warn when that is done.

    Args:
        families: makes a family from its name, its help text and its kind.
        labels: labels of every metric: model and version.
        weights: the weights files of the bundle.
        warn: called with each line for the operator.
    """

    def __init__(
        self, families: Families, labels: Mapping[str, str], weights: TableFiles, warn: Callable[[str], None]
    ) -> None:
        self._weights = weights
        self._warn = warn
        self._next = 0.0
        self._populated: PagesUsed | None = None
        # Set, not incremented: all instances map the same files.
        families_by_name = {
            "mapped": families("tbe_weights_bytes", "Bytes of weights files that each instance has mapped", "GAUGE"),
            "huge": families("tbe_weights_huge_bytes", "Bytes of weights files mapped in huge pages", "GAUGE"),
        }
        self._metrics = {name: family.Metric(labels) for name, family in families_by_name.items()}
        self._name = f"{labels['model']} {labels['version']}"
        self._fits = True
        self._warn_of_memory()
        weights.populate(self._has_populated)

    def publish(self) -> None:
        """Set the metrics, every `_PERIOD_S` seconds and after the files were read. Print warnings that are due."""
        self._warn_of_memory()
        if (used := self._populated) is not None:
            self._populated, self._next = None, 0.0
            if used.huge < _FEW * used.most_huge:
                self._warn(
                    f"{self._name}: {used.huge} of {used.mapped} bytes of weights are in huge pages, so that lookups "
                    f"take up to twice as long: {self._weights.why_small()}; or set --weights-memory huge"
                )
        if monotonic() >= self._next:
            self._next = monotonic() + _PERIOD_S
            used = self._weights.used()
            self._metrics["mapped"].set(used.mapped)
            self._metrics["huge"].set(used.huge)

    def _warn_of_memory(self) -> None:
        """Warn when the weights files no longer fit into memory, once until they fit again."""
        if self._fits and not self._weights.fits:
            self._warn(
                f"{self._name}: its weights are larger than memory, or than what other models and versions leave of "
                "it: rows are read from the disk as they are needed, until there is room"
            )
        self._fits = self._weights.fits

    def _has_populated(self, used: PagesUsed) -> None:
        self._populated = used
