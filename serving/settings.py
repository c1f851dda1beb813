"""How a model is served, whatever its version: what config.pbtxt says and `tbe-serve configure` changes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.errors import ConfigurationError
from serving.kjt import Limits
from serving.strict import is_utf8


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSettings:
    """How a model is served.

    Attributes:
        instances: processes that answer; each uses one core, all share one copy of the weights.
        merged_requests: most requests that are answered by one TBE call.
        queue_requests: a request that finds this many waiting is refused as UNAVAILABLE; 0 for any number.
        queue_timeout_ms: a request that waited longer is refused as UNAVAILABLE; 0 waits as long as the caller does.
            With either of the two, Triton 2.51 stalls an idle model for up to 500 ms (docs/decisions/0009).
        max_request_ids, max_request_samples: larger requests are refused as invalid.
        max_call_ids, max_call_samples: what is more together is answered by several TBE calls.
        max_busy_ms: of the requests that wait together, those that are not answered within this are refused as
            UNAVAILABLE, once a few calls were made: under more load than there is capacity no answer takes much
            longer than twice this, which by default is within the deadline that clients have by default, 1 s.
        version: the version that is served; the newest where None.
        verify_weights: compare the weights with their digests before a version serves, in a time that grows with them
            (about a second for each GB). Without it a byte that changed after export is served.
        capture: the folder that takes `<model>.jsonl`, refused requests for replay (ids only, never weights or
            embeddings); an absolute path that the server may write to. None keeps nothing.
        capture_slow_ms: keep requests too whose TBE call took longer than this.
        capture_max_bytes: nothing more is kept once the file has this size.
    """

    instances: int = 1
    merged_requests: int = 64
    queue_requests: int = 0
    queue_timeout_ms: int = 0
    max_request_ids: int = 4 << 20
    max_request_samples: int = 64 << 10
    max_call_ids: int = 128 << 10
    max_call_samples: int = 16 << 10
    max_busy_ms: int = 400
    version: int | None = None
    verify_weights: bool = True
    capture: str | None = None
    capture_slow_ms: float | None = None
    capture_max_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("instances", *_LIMITS):
            _expect(name, getattr(self, name), 1, _INT32)
        for name in ("queue_requests", "queue_timeout_ms"):
            _expect(name, getattr(self, name), 0, _INT32)
        _expect("capture_max_bytes", self.capture_max_bytes, 1, _INT64)
        if self.version is not None:
            _expect("version", self.version, 1, _INT64)
        if self.capture is not None and not (self.capture.startswith("/") and is_utf8(self.capture)):
            raise ConfigurationError(f"capture: expected an absolute path in UTF-8, got {self.capture!r}")
        if self.capture_slow_ms is not None and not 0 < self.capture_slow_ms < math.inf:
            raise ConfigurationError(f"capture_slow_ms: expected a finite number > 0, got {self.capture_slow_ms}")

    @property
    def limits(self) -> Limits:
        """Ids and samples of a request and of a call."""
        return Limits(**{name.removeprefix("max_"): getattr(self, name) for name in _LIMITS})

    @property
    def parameters(self) -> dict[str, str]:
        """What Triton's config has no field for, as the strings of its `parameters`."""
        said = {name: getattr(self, name) for name in PARAMETERS}
        texts = {name: str(value) for name, value in said.items() if value is not None}
        return texts | {"verify_weights": str(self.verify_weights).lower()}


# What `tbe-serve` adds to a served model's parameters, and config.pbtxt never has:
# it was loaded anew because its process died, so that a metric can tell, by a server started then (Unix time);
RECOVERED = "recovered"
# it serves a version other than config.pbtxt says, which says this one, or the newest.
INSTEAD_OF = "instead_of_version"
NEWEST = "newest"

# What the fields of Triton's config hold, and more of anything than it can do.
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_LIMITS = (
    "max_request_ids",
    "max_request_samples",
    "merged_requests",
    "max_call_ids",
    "max_call_samples",
    "max_busy_ms",
)
# Settings that Triton's config has no field for, and what they are.
PARAMETERS = dict.fromkeys((*_LIMITS, "capture_max_bytes"), int) | {
    "verify_weights": bool,
    "capture": str,
    "capture_slow_ms": float,
}
_FLAGS = {"true": True, "false": False}


def parsed(parameters: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of ServingSettings that config.pbtxt has as `parameters`, as far as they are there.

    Raises:
        ConfigurationError: a value is not a number, or true or false, where one is expected.
    """
    said: dict[str, Any] = {}
    for name, kind in PARAMETERS.items():
        if (text := parameters.get(name)) is not None:
            try:
                said[name] = _FLAGS[text] if kind is bool else kind(text)
            except (ValueError, KeyError) as error:
                expected = "true or false" if kind is bool else "a number"
                raise ConfigurationError(f"{name}: expected {expected}, got {text!r}") from error
    return said


def _expect(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigurationError(f"{name}: expected {least} to {most}, got {value}")
