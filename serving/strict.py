"""How JSON that anybody may have made is read: unknown and missing keys are refused by name."""

import msgspec

# What decoding may raise: no JSON, another type than expected, no UTF-8, brackets without end.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable, by keyword, and nothing but its fields."""
