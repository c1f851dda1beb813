"""What a timeout may be, for whoever takes one."""

from serving.arguments import check_argument
from serving.errors import ConfigurationError

_MOST_S = 1_000_000


def check_timeout(timeout_s: float) -> None:
    """Refuse a timeout that cannot be waited for.

    Raises:
        ConfigurationError: it is not a number of seconds above 0, or more than a million.
    """
    check_argument("timeout_s", timeout_s, float)
    if not 0 < timeout_s <= _MOST_S:
        raise ConfigurationError(f"timeout_s: expected > 0 and at most {_MOST_S}, got {timeout_s}")
