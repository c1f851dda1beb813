"""Whether a dense part keeps the samples of a batch apart: read off its operators, for any number of samples.

torch.export says which operators of core ATen a dense part is made of, and with which shapes, the number of samples
being a symbol. Each operator has to be known to keep samples apart where it is used so
(`export.batchability.operator_rules`). All others may let samples meet: requests are then scored one by one. Nothing
is run.
"""

import io
import operator
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from export.batchability.jagged import Counts, rows_of_jagged, rows_of_numbered
from export.batchability.operator_rules import rows_behind
from export.batchability.sample_axis import Call, Rows, fits, is_number, is_numbering, per_sample
from export.capture.branch_log import BranchLog, guard_on_ids, record_branches, symbols_of
from export.capture.graph_inputs import DenseInputs
from export.errors import first_line
from export.trained.running import quiet
from export.trained.source_location import short_line_of
from serving.bundle.scores import JaggedInput, JaggedKind

# What torch.fx, and then torch.export, take for what it is.
_FOLLOWED = ("torch", "torchrec", "fbgemm_gpu", "_operator", "builtins", "math")
# What TorchScript knows of an argument before it knows the numbers in it, and how many there are.
_ALIKE = ("aten::dim", "prim::dtype", "prim::device", "prim::Constant", "prim::CreateObject", "aten::is_grad_enabled")
_LOGIC = ("aten::__is__", "aten::__isnot__", "aten::__not__", "aten::eq", "aten::ne", "prim::GetAttr", "prim::If")
_OF_FIXED_LENGTH = (
    "aten::size", "aten::items", "aten::keys", "aten::values", "prim::ListConstruct", "prim::DictConstruct",
)  # fmt: skip
# So many samples that no layer is as wide.
_COMPARED = 61
# What TorchScript and torch.export write in their own ways.
_WRITTEN_OTHERWISE = (torch.ops.aten._to_copy.default, torch.ops.aten.slice.Tensor)


def find_mixing(
    module: fx.GraphModule,
    given: DenseInputs,
    jagged: Sequence[JaggedInput] = (),
    served: torch.jit.ScriptModule | None = None,
    by_id: Mapping[int, str] = MappingProxyType({}),
) -> str | None:
    """What may let the scores of a sample depend on other samples.

    Args:
        module: a dense part: tensors [B, …], and `jagged`, in, tensors [B, …], or [n, …], out.
        given: an example of what it is given; more than `_COMPARED` samples.
        jagged: what it takes of ids.
        served: what TorchScript made of it, where its code may do otherwise there. None: it is torch's alone.
        by_id: the tensors out with a row for each id of a key, by number, and that key.

    Returns:
        An operator, and the line of the model that it is of; or why the operators are not known. None: each row of
        every answer depends on the same row of the inputs alone, whatever B is.
    """
    try:
        # torch prints graphs that it cannot finish.
        with torch.no_grad(), quiet(), redirect_stderr(io.StringIO()), fx.traceback.preserve_node_meta():
            inputs = given.tensors(jagged)
            shapes = (_dims(given, jagged),)
            with record_branches(BranchLog()) as log:
                found = torch.export.export(_Steps(module), tuple(inputs), dynamic_shapes=shapes, strict=False)
            program = found.run_decompositions()
    except Exception as error:  # the model's code, and torch's, may raise anything
        if "data-dependent" in (said := first_line(error)):
            return "a size that hangs on numbers of the request, such as the longest history of a batch"
        return f"a step that torch.export cannot follow: {said}"
    if changed := program.graph_signature.buffers_to_mutate:
        return f"its buffer {min(changed.values())!r} changes"
    if served is not None:
        few = given.at(torch.arange(_COMPARED)).tensors(jagged)
        if more := _operators(served, few) - _operators(found.module(), few):
            return f"{min(more)[0]}, which TorchScript alone runs: its code is another one there"
    names = program.graph_signature.user_inputs
    given_nodes = [node for node in program.graph.nodes if node.name in names]
    sizes = {symbol for node in given_nodes for symbol in symbols_of(node.meta["val"].shape)}
    if guard_on_ids(given_nodes[0].meta["val"].shape[0].node, sizes, log.guards):
        return "a step that hangs on how many ids there are"
    of_ids = dict(zip(map(str, names[len(names) - len(jagged) :]), jagged, strict=True))
    keys = dict.fromkeys(map(str, names)) | {name: _key_of(given, each) for name, each in of_ids.items()}
    lengths = {
        name: given.fixed.get(each.name, given.key_of(each.name))
        for name, each in of_ids.items()
        if each.kind is JaggedKind.LENGTHS
    }
    of_answers = {number: given.key_of(key) for number, key in by_id.items()}
    return _first_unknown(program.graph, keys, lengths, of_answers)


def _key_of(given: DenseInputs, wanted: JaggedInput) -> str | None:
    """The key whose ids the rows of an input are of. None: they are samples."""
    return None if wanted.kind is JaggedKind.LENGTHS else given.key_of(wanted.name)


def _dims(given: DenseInputs, jagged: Sequence[JaggedInput]) -> tuple[dict[int, Any], ...]:
    """The dimensions that are not always of one size: one for all samples, and one for the ids of each key.

    A key that has as many ids in each sample has as many times the samples.
    """
    samples: Any = torch.export.Dim("samples", min=2)
    keys = [*(None for _ in (given.embeddings, *given.dense)), *(_key_of(given, each) for each in jagged)]
    counts = [None if key is None else given.fixed.get(key) for key in keys]
    sizes = [torch.export.Dim.AUTO if count is None else count * samples for count in counts]
    return tuple({0: samples if key is None else size} for key, size in zip(keys, sizes, strict=True))


def find_opaque_step(module: fx.GraphModule) -> str | None:
    """A function or module that is one step of a graph, and neither torch's nor torchrec's; None: there is none.

    Or a layer with hooks. It may do something else for other numbers of samples, which torch.export does not see,
    and something else in TorchScript.
    """
    for node in module.graph.nodes:
        called: Any = node.target
        if node.op == "call_module":
            called = type(module.get_submodule(str(node.target)))
        home = (getattr(called, "__module__", None) or "torch").partition(".")[0]
        if node.op == "call_module" and (hooked := _hooked(module.get_submodule(str(node.target)))) is not None:
            return f"a hook, or forward of its own, of a {type(hooked).__name__},{short_line_of(node)}"
        if node.op in ("call_module", "call_function") and home not in _FOLLOWED:
            return f"{called.__qualname__}, which is not followed,{short_line_of(node)}"
    return None


def _hooked(layer: nn.Module) -> nn.Module | None:
    """A part of a layer whose call is more than the forward of its class; None: there is none."""
    for part in layer.modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            return part
    return None


def find_branch(program: torch.jit.ScriptModule) -> str | None:
    """What in a program is done or not, or how often, as numbers say, or their count; None: nothing.

    torch.export sees one of the branches alone.
    """
    graph: Any = program.inlined_graph
    for kind in ("prim::If", "prim::Loop"):
        for node in graph.findAllNodes(kind, recurse=True):
            # A loop goes on as its last input says, and then as its block says.
            inputs = [*node.inputs()][: 1 if kind == "prim::If" else 2]
            again = [next(block.outputs()) for block in node.blocks() if kind == "prim::Loop"]
            if any(map(_follows_from_numbers, inputs + again)):
                return f"a branch or loop ({kind}) that its inputs decide"
    return None


def _follows_from_numbers(value: Any) -> bool:
    """Whether a value of TorchScript hangs on the numbers that a program is called with, or on their count."""
    node = value.node()
    is_length = node.kind() == "aten::len" and node.inputsAt(0).node().kind() in _OF_FIXED_LENGTH
    if is_length or node.kind() in _ALIKE:
        return False
    made_of = [*node.inputs(), *(output for block in node.blocks() for output in block.outputs())]
    return node.kind() not in _LOGIC or any(map(_follows_from_numbers, made_of))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are run on tensors of some samples."""

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[tuple[str, str]] = set()
        self._samples = samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [tuple(each.shape) if isinstance(each, Tensor) else each for each in args]
        has_samples = any(isinstance(each, tuple) and self._samples in each for each in given)
        if has_samples and func not in _WRITTEN_OTHERWISE:
            self.found.add((str(func), str(given)))
        return func(*args, **(kwargs or {}))


def _operators(module: nn.Module, inputs: Sequence[Tensor]) -> set[tuple[str, str]]:
    """The operators that a module runs on inputs, with the shapes of their tensors, and their other arguments."""
    seen = _Operators(len(inputs[0]))
    with torch.no_grad(), seen:
        module(*(each.clone() for each in inputs))
    return seen.found


class _Steps(nn.Module):
    """A graph, run step by step, so that what torch.export makes of a step has the line of the model's code."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        return fx.Interpreter(self.module).run(*inputs)


def _first_unknown(
    graph: fx.Graph,
    keys: Mapping[str, str | None],
    lengths: Mapping[str, str | int],
    by_id: Mapping[int, str],
) -> str | None:
    """The first step that may let samples meet.

    Args:
        graph: of ATen.
        keys: for each input, the key whose ids its rows are of; None: they are samples.
        lengths: for each input with the number of ids of a key, the key; or how many each sample has.
        by_id: for some answers, by number, the key whose ids their rows are of.
    """
    inputs = [node for node in graph.nodes if node.name in keys]
    samples = inputs[0].meta["val"].shape[0].node.expr
    sizes: dict[str | None, set[Any]] = {None: {samples}}
    rows: dict[fx.Node, Rows] = {}
    for node in inputs:
        size, key = node.meta["val"].shape[0], keys[node.name]
        count = per_sample(size, samples)
        if key is not None and count is None:
            sizes.setdefault(key, set()).add(size.node.expr)
        rows[node] = Rows(0, key=key) if count is None else Rows(0, count)
    answer = next(node for node in graph.nodes if node.op == "output")
    needed = _needed(answer)
    counts = Counts({node: lengths[node.name] for node in inputs if node.name in lengths}, samples)
    for node in graph.nodes:
        if node not in needed or node.op != "call_function" or is_number(node) or is_numbering(node, samples):
            continue
        made_of = node.all_input_nodes
        if _is_known(node) and not any(
            each in rows
            or is_number(each)
            or is_numbering(each, samples)
            or counts.is_offsets(each)
            or counts.of_numbering(each) is not None
            for each in made_of
        ):
            continue  # it is the same for all samples
        if isinstance(numbered := counts.of_numbering(node), str):
            sizes.setdefault(numbered, set()).add(node.meta["val"].shape[0].node.expr)
        if counts.is_offsets(node) or numbered is not None:
            continue
        found, shape = _rows_of(node, rows, counts, samples), getattr(node.meta["val"], "shape", None)
        known = sizes.get(found.key, ()) if found is not None else ()
        if found is None or (shape is not None and not any(fits(found, shape, size) for size in known)):
            return f"{node.target}{short_line_of(node)}"
        rows[node] = found
    for number, each in enumerate(answer.args[0]):
        key, size = by_id.get(number), each.meta["val"].shape[0]
        if key in sizes:
            expected, has_all = Rows(0, key=key), any(per_sample(size, of) == 1 for of in sizes[key])
        else:  # it has as many ids in each sample
            expected, has_all = Rows(0, per_sample(size, samples) or 1), per_sample(size, samples) is not None
        if rows.get(each) != expected or not has_all:
            return f"an answer whose rows are not samples{short_line_of(each)}"
    return None


def _needed(answer: fx.Node) -> set[fx.Node]:
    """The steps that an answer is made of. Others check numbers: where one fails, requests are scored one by one."""
    needed, waiting = set[fx.Node](), [answer]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def _rows_of(node: fx.Node, rows: Mapping[fx.Node, Rows], counts: Counts, samples: Any) -> Rows | None:
    """Where the samples of a step are; None: it may let them meet."""
    if node.target is operator.getitem:
        return rows[node.all_input_nodes[0]]
    if not _numbers_are_places(node, samples):
        return None  # a request that is merged has other numbers than alone
    if str(node.target).startswith("fbgemm."):
        return rows_of_jagged(node, rows, counts)
    if any(counts.of_numbering(each) is not None for each in node.all_input_nodes):
        return rows_of_numbered(node, rows, counts)
    if not _is_known(node) or any(map(counts.is_offsets, node.all_input_nodes)):
        return None  # as numbers, offsets count the ids of the samples before
    given = {each: rows[each] for each in node.all_input_nodes if each in rows}
    keys = {each.key for each in given.values()}
    if len(keys) > 1:
        return None  # ids of several keys: how many a sample has may differ
    op = cast(torch._ops.OpOverload, node.target)
    # Where they are among ids, they are not to meet other ids either.
    plain = {each: replace(found, key=None) for each, found in given.items()}
    found = rows_behind(op, Call(node, plain, samples), is_sized=any(map(is_number, node.all_input_nodes)))
    return found and replace(found, key=next(iter(keys), None))


def _numbers_are_places(node: fx.Node, samples: Any) -> bool:
    """Whether the numbers of samples that a step is given, if it is given some, are the rows that it takes: it is
    x[arange(B), …]."""
    numbered = [each for each in node.all_input_nodes if is_numbering(each, samples)]
    if not numbered:
        return True
    if str(node.target) != "aten.index.Tensor":
        return False
    source, indices = node.args[0], cast(Sequence[Any], node.args[1])
    return numbered == [indices[0]] and numbered[0] not in (source, *indices[1:])


def _is_known(node: fx.Node) -> bool:
    """Whether a step is an operator of ATen that answers with what follows from its arguments, and changes none."""
    op = node.target
    return op is operator.getitem or (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace == "aten"
        and not op._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
    )
