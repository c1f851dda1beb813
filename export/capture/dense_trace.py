"""A dense part as torch.export traces it: once, to be written, searched for mixed samples, and split at its user."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from export.capture.branch_log import BranchLog, guard_on_ids, record_branches, symbols_of
from export.capture.graph_inputs import DenseInputs
from export.capture.row_counts import dims_of_keys
from export.trained.eval_mode import quiet
from serving.bundle.scores import JaggedInput, JaggedKind


class DenseTrace:
    """A dense part for any number of samples and ids, which torch.export traces when it is first needed.

    Args:
        module: the dense part. It takes tensors [B, …] and `jagged`, and returns tensors [B, …] or [n, …].
        inputs: example inputs of two samples or more.
        jagged: the ids, lengths, weights and rows that it takes.
    """

    def __init__(self, module: fx.GraphModule, inputs: DenseInputs, jagged: Sequence[JaggedInput] = ()) -> None:
        self.module, self.inputs, self.jagged = module, inputs, jagged

    @property
    def program(self) -> "torch.export.ExportedProgram":
        """The exported program, which several steps of an export read: copy its graph before you change it.

        Its nodes have the lines of the model's code.

        Raises:
            Exception: torch.export cannot follow the dense part. torch does not say of which type.
        """
        return self._traced[0]

    def decomposed(self, *table: Any) -> "torch.export.ExportedProgram":
        """The exported program with other operators: of core ATen, or as `table` says.

        Raises:
            Exception: as `program`.
        """
        program = self.program
        with _tracing():
            decomposed: torch.export.ExportedProgram = program.run_decompositions(*table)
        return decomposed

    @property
    def depends_on_ids(self) -> bool:
        """Whether the program has a step that holds for some numbers of ids only.

        Raises:
            Exception: as `program`.
        """
        program, branches = self._traced
        names = program.graph_signature.user_inputs
        shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in names]
        symbols = {symbol for shape in shapes for symbol in symbols_of(shape)}
        return guard_on_ids(shapes[0][0].node, symbols, branches.guards) is not None

    @cached_property
    def _traced(self) -> tuple["torch.export.ExportedProgram", BranchLog]:
        keys = [None] * (1 + len(self.inputs.dense)) + [key_of_rows(self.inputs, tensor) for tensor in self.jagged]
        dims = dims_of_keys(keys, self.inputs.fixed)
        tensors = tuple(self.inputs.tensors(self.jagged))
        with _tracing(), record_branches(BranchLog()) as branches:
            program = torch.export.export(_Interpreted(self.module), tensors, dynamic_shapes=(dims,), strict=False)
        return program, branches


@contextmanager
def _tracing() -> Iterator[None]:
    # torch prints graphs that it cannot export.
    with torch.no_grad(), quiet(), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        for about in ("were assigned during export", "No complete tensor found in the group"):
            warnings.filterwarnings("ignore", message=f".*{about}", category=UserWarning)
        with fx.traceback.preserve_node_meta():
            yield


def key_of_rows(inputs: DenseInputs, jagged: JaggedInput) -> str | None:
    """The key of an input that has a row for each id of a key, or None if it has a row for each sample."""
    return None if jagged.kind is JaggedKind.LENGTHS else inputs.key_of(jagged.name)


class _Interpreted(nn.Module):
    """Runs a graph node by node, so that each node of torch.export keeps the line of the model's code."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        """The answer of the graph."""
        return fx.Interpreter(self.module).run(*inputs)
