"""What follows the collections of a model: as torch.fx follows it, as an example shows, or of the user's own."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from export.capture.given import Given
from export.capture.signature import Collections
from export.config import Example
from export.errors import ModelError
from export.scores.cut import Cut, cut
from export.scores.cut_example import follow_example
from export.scores.dense_inputs import inputs_of
from export.scores.requests import given_for, request_for, request_of, spans_of
from export.scores.user_dense import around
from export.trained.managed import is_sequence
from export.trained.tables import Trained
from serving.bundle.manifest import Manifest
from serving.bundle.scores import DenseInput
from serving.request.tensors import Ids, Tensors


@dataclass(frozen=True, slots=True)
class Behind:
    """What follows the collections of a model, before it is given its weights.

    Attributes:
        path: of `entry` in the module that was given.
        entry: the model around the collections; or a module of the user's own.
        cut: of it.
        inputs: its dense inputs.
        request: ids of all keys, to try it with.
        given: the same request, with dense inputs, and random embeddings and rows.
        notes: what of an example requests do not bring.
    """

    path: str
    entry: nn.Module
    cut: Cut
    inputs: tuple[DenseInput, ...]
    request: Tensors
    given: Given
    notes: tuple[str, ...] = ()


def behind_own(
    trained: Trained, manifest: Manifest, known: Mapping[str, Ids], widths: Mapping[str, int], own: nn.Module
) -> Behind:
    """A module of the user's own, in place of what follows; arguments as `export.scores.dense_part.dense_part`."""
    _expect_pooled(trained)
    found = around(own, spans_of(manifest), widths)
    inputs, request = inputs_of(found, widths), request_for(manifest, None, known)
    return Behind("", own, found, inputs, request, given_for(manifest, request, inputs))


def behind_example(trained: Trained, manifest: Manifest, columns: Collections, example: Example) -> Behind:
    """What follows, as torch.export followed the model from a call of it; arguments likewise."""
    followed = follow_example(trained.module, columns, example)
    found, inputs, notes = followed.cut(trained.module)
    given = followed.given(dense=found.inputs)
    return Behind("", trained.module, found, inputs, request_of(manifest, given.bags), given, tuple(notes))


def behind_forward(
    trained: Trained,
    manifest: Manifest,
    known: Mapping[str, Ids],
    widths: Mapping[str, int],
    columns: Collections,
) -> Behind:
    """What follows, as torch.fx followed the model; arguments likewise."""
    _expect_pooled(trained)
    path, entry = _entry(trained)
    found = cut(entry, columns)
    inputs, request = inputs_of(found, widths), request_for(manifest, None, known)
    return Behind(path, entry, found, inputs, request, given_for(manifest, request, inputs))


def _entry(trained: Trained) -> tuple[str, nn.Module]:
    """The model around the collections, and its path in the module that was given."""
    entries = [each.module for each in trained.found.entries]
    if len(entries) != 1 or entries[0] in trained.found.collections.values():
        found = ", ".join(type(each).__name__ for each in entries)
        raise ModelError(
            f"{type(trained.module).__name__}: expected one module around all collections, with scores, found "
            f"{found}: give that module, or export without --scores"
        )
    (path,) = (name for name, each in trained.module.named_modules() if each is entries[0])
    return path, entries[0]


def _expect_pooled(trained: Trained) -> None:
    for name, collection in trained.found.collections.items():
        if is_sequence(collection):
            raise ModelError(
                f"{name} ({type(collection).__name__}): scores are made of rows that are not pooled: give an example "
                "of a call: export_model(example=(…)), --example package.module:function"
            )
