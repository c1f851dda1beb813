"""The table of export options, from which the command line, the TOML file and ExportConfig follow.

A new option is an entry here, and a field of ExportConfig or Sharding with its default and bounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from export.commands.module import CHECKPOINT_PREFIX_HELP, TRAINED_MEMORY_HELP, named_example
from export.values import (
    bytes_per_s,
    dense_compiler,
    dense_dtype,
    id_dtype,
    id_policy,
    output_dtype,
    size_bytes,
    weight_dtype,
)
from serving.bundle.formats import WeightDtype
from serving.bundle.plan import ShardingType
from serving.bundle.scores import DenseDtype
from serving.bundle.tables import OutputDtype
from serving.terminal.options import integer, real

# In the file: one value for all tables, or values by table. Numbers may be written as text.
ByTable = str | int | float | dict[str, str | int | float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOption:
    """One option of `tbe-export model` and `tbe-export plan`, and its key in the TOML file.

    Attributes:
        name: the key. The option is `--name`, with dashes.
        help: the text of `--help`.
        typed: the type of its value on the command line.
        written: the type of its value in the file; None takes `typed`.
        parse: makes the config's value from the name, for messages, and the value typed or written.
        section: the file's TOML table with the key; "" for the top.
        field: the field that it sets, of Sharding for "sharding", of ExportConfig for ""; None takes `name`.
        flag: the option, if it is not `--name`.
        metavar: the placeholder of a value that is set by table, as in `[TABLE=]DTYPE`. The option may be repeated,
            and `parse` gets one value at a time, as text. None: the option is not set by table.
        by: the placeholder of what it is set by, if not TABLE.
    """

    name: str
    help: str
    typed: Any = list[str]
    written: Any = None
    parse: Callable[[str, Any], Any] = lambda _, value: value
    section: str = ""
    field: str | None = None
    flag: str | None = None
    metavar: str | None = None
    by: str = "TABLE"

    @property
    def file_type(self) -> Any:
        """The type of its value in the file."""
        return self.written or (ByTable if self.metavar else self.typed)

    @property
    def terminal_type(self) -> Any:
        """The annotation that typer makes an option of."""
        metavar = f"[{self.by}=]{self.metavar}" if self.metavar else None
        return Annotated[self.typed | None, typer.Option(*filter(None, [self.flag]), metavar=metavar, help=self.help)]

    def value_of(self, value: Any) -> Any:
        """Parse a value from the command line or the file into the field's value.

        Raises:
            ConfigurationError: naming the setting, what was expected and what came.
        """
        if not self.metavar:
            return self.parse(self.name, value)
        return parsed_by_table(self.name, self.parse, value)


def parsed_by_table(setting: str, parse: Callable[[str, str], Any], value: ByTable) -> dict[str, Any]:
    """Parse the value of each table, or glob over tables. A value that is not by table is for all tables.

    Raises:
        ConfigurationError: as `parse` does.
    """
    by_table = value if isinstance(value, dict) else {"*": value}
    return {pattern: parse(setting, str(value)) for pattern, value in by_table.items()}


def _names(kind: type[Enum]) -> str:
    return ", ".join(str(member.value).lower() for member in kind)


OPTIONS = (
    ExportOption(
        name="dtype",
        metavar="DTYPE",
        parse=weight_dtype,
        help=f"Dtype of stored rows: {_names(WeightDtype)}; int8 by default. TABLE is a name or a glob such as "
        "item*; the last match wins.",
    ),
    ExportOption(
        name="id_policy",
        metavar="POLICY",
        parse=id_policy,
        help="What an id outside the table does: error (default) refuses the request, zero skips the id, "
        "default_row:N reads row N, modulo reads row id mod rows.",
    ),
    ExportOption(
        name="max_error",
        metavar="X",
        parse=real,
        help="Largest allowed error of an element, in units of the weights. Without --dtype, the smallest dtype "
        "within it is chosen; with --dtype, the export fails if an element is further off.",
    ),
    ExportOption(name="checkpoint_prefix", typed=str, help=CHECKPOINT_PREFIX_HELP),
    ExportOption(
        name="trained_memory",
        field="trained_memory_bytes",
        typed=str,
        written=str | int,
        parse=partial(size_bytes, least=0),
        help=TRAINED_MEMORY_HELP,
    ),
    ExportOption(
        name="output_dtype",
        typed=str,
        parse=output_dtype,
        help=f"Dtype of served embeddings: {_names(OutputDtype)}; fp32 by default.",
    ),
    ExportOption(
        name="id_dtype",
        typed=str,
        parse=id_dtype,
        help="Dtype of ids in a request: int64 (default), or int32, which halves their bytes. int32 is refused for "
        "raw ids and for tables of more than 2^31 rows.",
    ),
    ExportOption(
        name="sums_dtype",
        typed=str,
        parse=output_dtype,
        help="Dtype of the partial sums that hosts send to a router: fp32 (default), or fp16, half the bytes.",
    ),
    ExportOption(
        name="scores",
        typed=bool,
        help="Serve the whole model: also compile its layers after the collections, and serve their outputs.",
    ),
    ExportOption(
        name="dense_dtype",
        typed=str,
        parse=dense_dtype,
        help="With --scores: dtype of the weights of the layers after the collections: "
        f"{_names(DenseDtype)}; fp32 by default.",
    ),
    ExportOption(
        name="compile",
        typed=str,
        parse=dense_compiler,
        help="With --scores: also compile the layers after the collections to native code: aoti, by AOTInductor, for "
        "x86-64-v3 and this build of torch. It needs a C++ compiler, and takes 20 s or more.",
    ),
    ExportOption(
        name="dense_widths",
        flag="--dense-width",
        metavar="N",
        by="INPUT",
        parse=integer,
        help="With --scores: the number of columns of a dense input, if no nn.Linear takes it.",
    ),
    ExportOption(
        name="example",
        typed=str,
        parse=lambda _, spec: named_example(spec),
        help="package.module:name of the arguments of one call of the model: a tuple, a dict by name, or a function "
        "without arguments that returns either. Needed if the model takes more than one KJT and tensors [B, width].",
    ),
    ExportOption(
        name="user_side",
        written=list[str],
        parse=lambda _, patterns: tuple(patterns),
        help="With --scores: a feature or dense input that all items of a ranking request share, or a glob; may be "
        "given again. What depends on these alone is computed once for a request.",
    ),
    ExportOption(
        name="labelled",
        typed=Path,
        written=str,
        parse=lambda _, path: Path(path),
        help='With --scores: JSON lines as `tbe-serve score` takes them, with a "label" of 0 or 1 for each sample. '
        "The export prints the AUC of the bundle and of the trained model on them.",
    ),
    ExportOption(
        section="sharding", name="ranks", typed=int, help="Number of ranks on all hosts together; 1 by default."
    ),
    ExportOption(
        section="sharding",
        name="ranks_per_host",
        typed=int,
        help="Ranks on each host; by default all are on one host.",
    ),
    ExportOption(
        section="sharding",
        name="memory_per_rank",
        field="memory_bytes",
        typed=str,
        written=str | int,
        parse=size_bytes,
        help="Memory of a rank, such as 16GB; by default this machine's memory ÷ ranks, with --hosts-as-models ÷ "
        "ranks of a host. One rank has no limit by default.",
    ),
    ExportOption(
        section="sharding",
        name="types",
        flag="--sharding",
        metavar="TYPE",
        parse=lambda _, text: text.lower(),
        help="How tables are sharded: auto (TorchRec's planner, default), auto-simple (row-wise over 1 M rows, else "
        f"column-wise over 256 columns, else table-wise), or {_names(ShardingType)}.",
    ),
    ExportOption(
        section="sharding",
        name="row_wise_over",
        typed=int,
        help="auto-simple shards tables with more rows than this row-wise; 1,000,000 by default.",
    ),
    ExportOption(
        section="sharding",
        name="column_wise_over",
        typed=int,
        help="auto-simple shards other tables with more columns than this column-wise; 256 by default.",
    ),
    ExportOption(
        section="sharding",
        name="min_partition",
        metavar="N",
        parse=integer,
        help="Least number of columns in a column-wise shard, a multiple of 4. By default TorchRec's planner decides "
        "for auto; for other types a table has one block of columns for each rank, for grid_shard for each host.",
    ),
    ExportOption(
        section="sharding",
        name="pooling_factors",
        flag="--pooling-factor",
        metavar="X",
        parse=real,
        help="Mean number of ids in a bag, for planning; 1 by default.",
    ),
    ExportOption(
        section="sharding",
        name="traffic",
        typed=Path,
        written=str,
        parse=lambda _, path: Path(path),
        help="A file of captured requests, in which pooling factors are measured unless set by --pooling-factor.",
    ),
    ExportOption(
        section="sharding",
        name="batch_size",
        typed=int,
        help="Samples in a request, for planning; 512 by default.",
    ),
    ExportOption(
        section="sharding",
        name="plan",
        typed=Path,
        written=str,
        parse=lambda _, path: Path(path),
        help="A file with the plan to use: JSON as `tbe-export plan --json` prints it.",
    ),
    ExportOption(
        section="sharding",
        name="hosts_as_models",
        typed=bool,
        help="Make a model for each host, NAME-host-0 and so on, which serves its shards, and the model NAME, a "
        "router that calls them.",
    ),
    ExportOption(
        section="sharding",
        name="router_memory",
        field="router_bytes",
        typed=str,
        written=str | int,
        parse=partial(size_bytes, least=0),
        help="With --hosts-as-models: the router's memory for small and hot tables of its own; 1GB by default.",
    ),
    ExportOption(
        section="sharding",
        name="network_bandwidth",
        field="network_bytes_per_s",
        typed=str,
        written=str | int,
        parse=bytes_per_s,
        help="Bandwidth of the network between hosts, such as 10Gb/s or 1.25GB/s, for planning; by default "
        "TorchRec's figure, 13.4GB/s.",
    ),
)
