"""The health of a server: what `/livez`, `/readyz` and the metrics of the server as a whole say."""

import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus

from serving.errors import ServingError
from serving.server.delta_service import DeltaService
from serving.server.tls import ServerTls

# Seconds after which a supervisor that did not check its server counts as dead.
_SILENT_S = 60.0
Answer = tuple[int, bytes]


@dataclass(slots=True)
class HealthState:
    """What a server can do now. Code that starts and watches it writes this; the operations port reads it.

    Attributes:
        server_problem: why tritonserver does not serve, or None if it does.
        model_problems: why models do not serve, by name. Models that serve are left out.
        is_draining: whether the server was told to stop, and still answers.
        is_stopping: whether the server stops.
        last_supervised: when the supervisor last checked the server, by `time.monotonic`; None without a supervisor.
        tls: the certificate that tritonserver reads when it starts, or None.
        restarts: how often tritonserver was restarted.
        certificate_expires: when the certificate expires that tritonserver has read, in Unix time; None without a
            certificate, or before tritonserver starts.
        store_read: when each followed store was last read, in Unix time, by URL.
        release_problems: why the release of a model is not served, by model; None if it is served.
        deltas: the live copies, or None.
        tls_context: the TLS of the operations port, or None. It gets a renewed certificate when tritonserver does.
    """

    server_problem: str | None = "starting"
    model_problems: dict[str, str] = field(default_factory=dict)
    is_draining: bool = False
    is_stopping: bool = False
    last_supervised: float | None = None
    tls: ServerTls | None = None
    restarts: int = 0
    certificate_expires: float | None = None
    store_read: dict[str, float] = field(default_factory=dict)
    release_problems: dict[str, str | None] = field(default_factory=dict)
    deltas: DeltaService | None = None
    tls_context: ssl.SSLContext | None = None

    def reload_certificate(self) -> None:
        """Load the certificate that tritonserver, which is about to start, reads now."""
        if self.tls is not None:
            with suppress(OSError, ValueError, ServingError):  # tritonserver says so
                replace(self.tls)  # a pair that does not fit would leave the context without a key
                if self.tls_context is not None:
                    self.tls_context.load_cert_chain(self.tls.certificate, self.tls.private_key)
                self.certificate_expires = self.tls.expires()

    def note_store_read(self, store: str, time_s: float) -> None:
        """A store was read, in Unix time."""
        self.store_read[store] = time_s

    def live(self) -> Answer:
        """The answer to `/livez`."""
        silent_s = 0.0 if self.last_supervised is None else time.monotonic() - self.last_supervised
        if silent_s > _SILENT_S:
            return (
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"not alive: tritonserver has not been supervised for {silent_s:.0f} s\n".encode(),
            )
        return HTTPStatus.OK, b"alive\n"

    def ready(self) -> Answer:
        """The answer to `/readyz`."""
        reasons = [f"model {model!r}: {why}" for model, why in sorted(self.model_problems.copy().items())]
        if self.server_problem is not None:
            reasons = [self.server_problem]
        if self.is_draining:
            reasons = ["draining: requests are still answered"]
        if self.is_stopping:
            reasons = ["stopping"]
        if reasons:
            return HTTPStatus.SERVICE_UNAVAILABLE, "".join(f"not ready: {why}\n" for why in reasons).encode()
        return HTTPStatus.OK, b"ready\n"

    def metrics(self) -> bytes:
        """The metrics of the server as a whole, which exist even while tritonserver does not run."""
        is_ready = self.ready()[0] == HTTPStatus.OK
        metrics = [("tbe_ready", "gauge", "Whether the server is ready: 1 or 0", f"{is_ready:d}")]
        metrics.append(("tbe_restarts_total", "counter", "Restarts of tritonserver", f"{self.restarts}"))
        if self.certificate_expires is not None:
            name, text = "tbe_certificate_expires_timestamp_seconds", "When the served certificate expires, Unix time"
            metrics.append((name, "gauge", text, f"{self.certificate_expires:.0f}"))
        lines = [
            f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name} {value}\n" for name, kind, text, value in metrics
        ]
        if store_read := self.store_read.copy():
            name, text = "tbe_store_read_timestamp_seconds", "When a store was last read that is followed, Unix time"
            lines.append(f"# HELP {name} {text}\n# TYPE {name} gauge\n")
            lines += [f'{name}{{store="{url}"}} {time_s:.0f}\n' for url, time_s in sorted(store_read.items())]
        if releases := self.release_problems.copy():
            name, text = (
                "tbe_release_failed",
                "Whether a release that is followed is refused or cannot be served: 1 or 0",
            )
            lines.append(f"# HELP {name} {text}\n# TYPE {name} gauge\n")
            lines += [f'{name}{{model="{model}"}} {why is not None:d}\n' for model, why in sorted(releases.items())]
        return "".join(lines).encode() + (b"" if self.deltas is None else self.deltas.metrics())
