"""What operators see of the memory that weights lie in."""

from collections.abc import Callable, Mapping
from time import monotonic

from serving.backend.families import Families
from serving.ranks.weights import PagesUsed, Weights

# Linux walks the pages to count them: that is not for twice a second.
_PERIOD_S = 15.0
# Where less of the weights than this is in huge pages, the log says why.
_FEW = 0.9


class PageMetrics:
    """How much of the weights is mapped, and in huge pages. It brings them into memory, too, which it waits for.

    Args:
        families: makes a family from its name, its help text and its kind.
        labels: labels of every metric: model and version.
        weights: of the bundle.
        warn: takes what an operator should know, once.
    """

    def __init__(
        self, families: Families, labels: Mapping[str, str], weights: Weights, warn: Callable[[str], None]
    ) -> None:
        self._weights = weights
        self._warn = warn
        self._next = 0.0
        self._populated: PagesUsed | None = None
        # Set, not added up: all instances map the same files. Triton deletes a family that nothing holds.
        self._families = {
            "mapped": families("tbe_weights_bytes", "Bytes of weights that each instance has mapped", "GAUGE"),
            "huge": families("tbe_weights_huge_bytes", "Bytes of weights that are mapped in huge pages", "GAUGE"),
        }
        self._metrics = {name: family.Metric(labels) for name, family in self._families.items()}
        self._name = f"{labels['model']} {labels['version']}"
        self._fits = True
        self._tell_of_room()
        weights.populate(self._has_populated)

    def publish(self) -> None:
        """Tell Triton what Linux says, if the last time is long enough ago."""
        self._tell_of_room()
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

    def _tell_of_room(self) -> None:
        """Say that there is no room, once each time that it was lost."""
        if self._fits and not self._weights.fits:
            self._warn(
                f"{self._name}: its weights are larger than memory, or than what other models and versions leave of "
                "it: rows are read from the disk as they are needed, until there is room"
            )
        self._fits = self._weights.fits

    def _has_populated(self, used: PagesUsed) -> None:
        self._populated = used
