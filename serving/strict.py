"""The base of every type that is read from a bundle: unknown and missing keys are refused by name."""

import msgspec


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable, by keyword, and nothing but its fields."""
