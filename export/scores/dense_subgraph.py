"""The dense subgraph of a model: the part of its forward after its collections, with named inputs and outputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from export.batchability.differences import Numbers
from export.capture.graph_inputs import DenseInputs
from export.capture.output_names import named_outputs, not_tensors
from export.errors import ExportError, ModelError, last_line
from export.trained.eval_mode import quiet
from serving.bundle.scores import JaggedInput, wrong_names
from serving.lookup.dense_files import Forward

WAY_OUT = (
    "give an example of a call (example=…, --example) if there is none, or dense=…, a module of your own that takes "
    "pooled embeddings, or export without --scores"
)


@contextmanager
def model_errors(name: str, failure: str, line_of_error: Callable[[Exception], str] = last_line) -> Iterator[None]:
    """Turn any error of the model's code into a ModelError.

    Args:
        name: the class of the model.
        failure: what the model cannot do.
        line_of_error: the line of an error for the message.

    Raises:
        ModelError: naming the model, the failure, the error, and the way out.
    """
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise ModelError(f"{name}: {failure}: {line_of_error(error)}: {WAY_OUT}") from error


@dataclass(frozen=True, slots=True)
class DenseSubgraph:
    """The part of a model's forward after its collections.

    Attributes:
        model_name: the class of the model, for messages.
        module: takes the embeddings, float32 or float16 [B, D], then the dense inputs, then `jagged`. It returns a
            tuple of tensors.
        input_names: the dense inputs with a row for each sample.
        output_names: the tensors that the module returns.
        eager_answer: runs a model itself, and returns its answer by output.
        jagged: the ids, lengths, weights and rows that the module takes.
        by_id: the key of each output that has a row for each id of a key.
        is_timeless: whether tracing showed that no output depends on a clock.
    """

    model_name: str
    module: fx.GraphModule
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    eager_answer: Callable[[nn.Module, DenseInputs], Mapping[str, Tensor]]
    jagged: tuple[JaggedInput, ...] = ()
    by_id: Mapping[str, str] = field(default_factory=dict)
    is_timeless: bool = False

    def run(self, forward: Forward, inputs: DenseInputs) -> list[Tensor]:
        """Run a dense part of this subgraph on copies of its inputs.

        Args:
            forward: the dense part, compiled or not.
            inputs: of the dense part.

        Returns:
            The outputs in order, [B, …], or [n, …] for an output with a row for each id of a key.

        Raises:
            ModelError: the dense part cannot be run, or an output has another number of rows.
        """
        failure = f"its forward cannot be run for {inputs.samples} samples after its collections"
        with torch.no_grad(), quiet(), model_errors(self.model_name, failure):
            answer: list[Tensor] = list(forward(*(tensor.clone() for tensor in inputs.tensors(self.jagged))))
        for name, output in zip(self.output_names, answer, strict=True):
            key = self.by_id.get(name)
            rows = inputs.samples if key is None else len(inputs.bags[key].ids)
            if output.ndim == 0 or len(output) != rows:
                unit = "samples" if key is None else f"ids of {key!r}"
                raise ModelError(
                    f"{self.model_name}: output {name!r}: expected shape [{rows}, …] for {rows} {unit}, got "
                    f"{list(output.shape)}: {WAY_OUT}"
                )
        return answer

    def scores(self, forward: Forward, inputs: DenseInputs) -> dict[str, Numbers]:
        """The outputs of a dense part by name; arguments and errors as `run`."""
        answer = self.run(forward, inputs)
        return {name: output.cpu().numpy() for name, output in zip(self.output_names, answer, strict=True)}


def finish_subgraph(
    model: nn.Module,
    module: fx.GraphModule,
    input_names: tuple[str, ...],
    run_model: Callable[[nn.Module, DenseInputs], Any],
) -> DenseSubgraph:
    """Name the outputs of a graph and type its inputs, so that TorchScript can compile it.

    Args:
        model: the model that the graph was made of.
        module: takes the embeddings, then `input_names`, and answers as the model does.
        input_names: the dense inputs.
        run_model: runs a model itself.

    Raises:
        ModelError: the answer has no tensors, or a name cannot be served.
    """
    output_names = _flatten_outputs(model, module.graph)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.type = Tensor
    for wrong in wrong_names(input_names, output_names):
        raise ModelError(f"{type(model).__name__}: {wrong}")
    module.graph.lint()

    def eager_answer(eager_model: nn.Module, inputs: DenseInputs) -> Mapping[str, Tensor]:
        answer = run_model(eager_model, inputs)
        tensors, _ = named_outputs(model, answer, Tensor, WAY_OUT)
        if list(tensors) != list(output_names):
            raise not_tensors(model, type(answer).__name__, WAY_OUT)
        return tensors

    # A new GraphModule has only the submodules that the graph calls. `delete_all_unused_submodules` would remove the
    # collections from the model itself.
    used = fx.GraphModule(module, module.graph, type(model).__name__)
    return DenseSubgraph(type(model).__name__, used, input_names, output_names, eager_answer)


def _flatten_outputs(model: nn.Module, graph: fx.Graph) -> tuple[str, ...]:
    """Make a graph return a tuple of tensors, and return their names."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    answer: Any = output.args[0]
    named_tuple = None
    if isinstance(answer, fx.Node) and hasattr(answer.target, "_fields"):  # torch.fx calls the class of a named tuple
        named_tuple = answer
        answer = cast(Any, answer.target)(*answer.args, **answer.kwargs)
    outputs, _ = named_outputs(model, answer, fx.Node, WAY_OUT)
    with graph.inserting_before(output):
        output.type = None
        output.args = (tuple(outputs.values()),)
    if named_tuple is not None:
        graph.erase_node(named_tuple)
    return tuple(outputs)
