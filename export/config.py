"""What to export: the dtype, id policy and error limit of each table, and how the model answers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from export.plan.sharding import Sharding, check_patterns, last_match
from serving.arguments import check_argument, check_arguments
from serving.bundle.formats import WeightDtype
from serving.bundle.plan import IdDtype
from serving.bundle.scores import DenseCompiler, DenseDtype
from serving.bundle.tables import DefaultRow, IdPolicy, OutputDtype
from serving.errors import ConfigurationError
from serving.model.settings import ServingSettings

# One call of a model, as torch.export takes it: its arguments by position, or by name.
Example = tuple[object, ...] | Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """How tables are stored and answered.

    A mapping goes from a table's name, or a glob over names, to a setting. The last that matches a table counts.

    Attributes:
        dtype: how rows are stored. A table without a dtype gets the smallest within its `max_error`, or INT8 if it
            has no `max_error`.
        id_policy: what happens to ids outside [0, rows); `error` where no pattern matches.
        max_error: largest allowed |float − stored| of an element, in the units of the weights. A table without one is
            still checked: no element may move further than rounding explains.
        checkpoint_prefix: what the keys of the model begin with in its checkpoint. None: the one prefix under which
            all of them fit.
        trained_memory_bytes: with a checkpoint, the trained model is run, and compared with what serves, if its
            tables take at most this many bytes in FP32. None: half of the available memory. 0: it is not run.
        output_dtype: dtype of the pooled embeddings.
        id_dtype: dtype of the ids in a request on the wire. INT32 halves their bytes.
        sums_dtype: dtype of the partial sums that hosts send to a router. FP16 halves the traffic; answers then
            differ from those of the same plan in one process.
        scores: whether the dense part is served as well: the model's own answers, from ids and dense inputs.
        dense_dtype: how the weights of that part are kept.
        compile: also compile the dense part to native code, which serves where processor and torch are those that it
            was compiled for. None: it is not compiled.
        dense_widths: the columns of dense inputs that no nn.Linear takes, by name.
        example: one call of the model that works, as torch.export takes it: its arguments as a tuple, or by name as a
            dict. They may hold KeyedJaggedTensors and tensors in dicts, dataclasses and objects of any class. Ids
            that reach a collection become keys of requests; other tensors with a row for each sample become dense
            inputs, named by their path; everything else stays as in the example. None: its forward takes one KJT, and
            dense inputs [B, width].
        user_side: patterns of the features and dense inputs that all items of a ranking request share. What depends
            on them alone is computed once for a request that sends exactly these once.
        labelled: a file of requests for scores with labels, on which their AUC is measured. None measures none.
        sharding: the ranks, and how tables are placed on them; one rank by default.
        serving: how all versions of the model are served. None gives a new model the defaults, and leaves the
            settings of an existing model as they are.

    Raises:
        ConfigurationError: an argument is of another type, or a limit is not a finite number above 0.
    """

    dtype: Mapping[str, WeightDtype] = field(default_factory=dict)
    id_policy: Mapping[str, IdPolicy | DefaultRow] = field(default_factory=dict)
    max_error: Mapping[str, float] = field(default_factory=dict)
    checkpoint_prefix: str | None = None
    trained_memory_bytes: int | None = None
    output_dtype: OutputDtype = OutputDtype.FP32
    id_dtype: IdDtype = IdDtype.INT64
    sums_dtype: OutputDtype = OutputDtype.FP32
    scores: bool = False
    dense_dtype: DenseDtype = DenseDtype.FP32
    compile: DenseCompiler | None = None
    dense_widths: Mapping[str, int] = field(default_factory=dict)
    example: Example | None = field(default=None, compare=False)
    user_side: Sequence[str] = ()
    labelled: Path | None = None
    sharding: Sharding = field(default_factory=Sharding)
    serving: ServingSettings | None = None

    def __post_init__(self) -> None:
        check_arguments(self)
        for pattern, policy in self.id_policy.items():
            if isinstance(policy, DefaultRow):
                check_argument(f"id_policy {pattern!r}: default_row", policy.default_row, int)
        for pattern, limit in self.max_error.items():
            if not (limit > 0 and math.isfinite(limit)):
                raise ConfigurationError(f"max_error {pattern!r}: expected a finite number > 0, got {limit}")
        if self.trained_memory_bytes is not None and self.trained_memory_bytes < 0:
            raise ConfigurationError(f"trained_memory: expected 0 or more bytes, got {self.trained_memory_bytes}")
        for name, width in self.dense_widths.items():
            if width < 1:
                raise ConfigurationError(f"dense_widths (--dense-width) {name!r}: expected > 0, got {width}")
        if self.example is not None and self.dense_widths:
            raise ConfigurationError("dense_widths (--dense-width): expected none beside an example, which has them")
        needs_scores = {
            "dense_widths (--dense-width)": self.dense_widths,
            "user_side (--user-side)": self.user_side,
            "labelled (--labelled)": self.labelled,
            "serving: score_threads": self.serving and self.serving.score_threads,
            "dense_dtype (--dense-dtype)": self.dense_dtype is not DenseDtype.FP32,
            "compile (--compile)": self.compile,
        }
        for setting, value in needs_scores.items():
            if value and not self.scores:
                raise ConfigurationError(f"{setting}: expected --scores beside it")
        if self.labelled is not None and self.sharding.hosts_as_models:
            raise ConfigurationError(
                "labelled (--labelled): expected no --hosts-as-models beside it: a router scores when its hosts are "
                "served: measure the same export without hosts"
            )

    def dtype_of(self, table: str) -> WeightDtype | None:
        """The dtype set for `table`, or None."""
        return last_match(dict[str, WeightDtype | None](self.dtype), table, None)

    def id_policy_of(self, table: str) -> IdPolicy | DefaultRow:
        """What happens to ids outside `table`."""
        return last_match(dict[str, IdPolicy | DefaultRow](self.id_policy), table, IdPolicy.ERROR)

    def max_error_of(self, table: str) -> float | None:
        """The limit set for `table`, or None."""
        return last_match(dict[str, float | None](self.max_error), table, None)

    def check_patterns(self, tables: Iterable[str]) -> None:
        """Refuse a pattern that matches no table.

        Raises:
            ConfigurationError: naming the pattern and the tables there are.
        """
        names = list(tables)
        for setting in ("dtype", "id_policy", "max_error"):
            check_patterns(setting, getattr(self, setting), names)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an export: `done` of `total` bytes of `step`.

    The bytes are those of float rows, or of files if a version and its deltas become the next version.
    """

    step: str
    done: int
    total: int
