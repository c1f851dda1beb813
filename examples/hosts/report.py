"""What happened, as a page."""

import time
from dataclasses import dataclass, field


@dataclass
class Report:
    """What happened, as lines of a page."""

    began: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)

    def say(self, line: str = "") -> None:
        """Print a line, and keep it for the page."""
        print(line, flush=True)
        self.lines.append(line)

    def step(self, what: str) -> None:
        """A step begins."""
        self.say(f"\n## {what} ({time.monotonic() - self.began:.0f} s)\n")
