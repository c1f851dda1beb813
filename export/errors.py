"""Everything that can go wrong on the export side, under one root."""


class ExportError(Exception):
    """Root of every error that `export` raises. Nothing was published."""


class ConfigError(ExportError):
    """The export was asked for something that does not exist or contradicts itself."""


class ModelError(ExportError):
    """The module holds tables that cannot be served."""


class CheckpointError(ExportError):
    """The checkpoint cannot be read, or does not hold the tables of the module."""


class QuantizeError(ExportError):
    """A row cannot be stored in the dtype asked for; names table and row."""


class PlanError(ExportError):
    """The tables do not fit the ranks; names a table, and by how much."""


class ParityError(ExportError):
    """A table's answers moved further than its limit; names the tables and the step."""


class PublishError(ExportError):
    """The repository cannot take the bundle."""
