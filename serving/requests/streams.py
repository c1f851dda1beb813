"""What the streams of engines and clients have in common: the form of a batch, and errors that name the batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from serving.errors import ConfigurationError, InvalidRequest, ServingError
from serving.requests.chunks import joined
from serving.requests.dense_inputs import NO_DENSE
from serving.requests.frames import is_frame
from serving.requests.types import Tensors

# The method of an engine or a client that answers the batches of a stream.
Method = Literal["score", "lookup"]
# The error of a batch is raised at its place, which ends the stream; or yielded there.
Errors = Literal["raise", "yield"]
# The default deadline of each request, in seconds: a stream rather waits for a busy server than fails.
STREAM_TIMEOUT_S = 60.0
# Called with the number of samples that a stream has answered.
SamplesDone = Callable[[int], object]


def check_stream(batches: Any, method: Any, errors: Any) -> None:
    """Refuse one batch in place of several, and other words than those of `Method` and `Errors`.

    Raises:
        ConfigurationError: naming the argument.
    """
    if is_frame(batches) or isinstance(batches, (Mapping, str)) or not isinstance(batches, Iterable):
        raise ConfigurationError(
            f"batches: expected an iterable of batches, got {type(batches).__name__}: one batch is a list, [batch]"
        )
    for name, value, allowed in (("method", method, get_args(Method)), ("errors", errors, get_args(Errors))):
        if value not in allowed:
            raise ConfigurationError(f"{name}: expected {' or '.join(map(repr, allowed))}, got {value!r:.80}")


def features_and_dense(batch: Any, method: Method) -> tuple[Any, Any]:
    """The features and the dense inputs of a batch: of a tuple (features, dense), or of features alone.

    Raises:
        InvalidRequest: a lookup has dense inputs.
    """
    if not isinstance(batch, tuple):
        return batch, NO_DENSE
    if len(batch) != 2 or method == "lookup":
        expected = "features" if method == "lookup" else "features, or (features, dense)"
        raise InvalidRequest(f"expected {expected}, got a tuple of {len(batch)}")
    return batch


def answer_batches(
    batches: Iterable[Any], answer: Callable[[Any], tuple[Any, int]], errors: Errors, progress: SamplesDone
) -> Iterator[Any]:
    """Answer batches one after the other. The next is read when the answer to this one has been taken.

    Args:
        batches: the batches.
        answer: returns the answer to a batch, and the number of its samples.
        errors: what happens to a ServingError of `answer`.
        progress: called after each batch.
    """
    samples_done = 0
    for number, batch in enumerate(batches):
        try:
            answered, samples = answer(batch)
        except ServingError as error:
            named = name_batch(error, number)
            if errors == "raise":
                raise
            yield named
            continue
        samples_done += samples
        progress(samples_done)
        yield answered


def answer_chunks(chunks: Iterator[Tensors], answer: Callable[[Tensors], Mapping[str, Any]]) -> tuple[Any, int]:
    """The answer to a batch from the answers to its chunks, one after the other, and the number of its samples.

    Raises:
        ServingError: of a chunk.
    """
    answers, samples = [], 0
    for chunk in chunks:
        try:
            answers.append(answer(chunk))
        except ServingError as error:
            name_chunk(error, samples, sample_count(chunk))
            raise
        samples += sample_count(chunk)
    return joined(answers), samples


def name_batch(error: ServingError, number: int) -> ServingError:
    """The error of a batch, with the number of the batch in its message."""
    error.args = (f"batch {number}: {error}", *error.args[1:])
    return error


def name_chunk(error: ServingError, first: int, samples: int) -> ServingError:
    """The error of a chunk of a batch. Its message says which samples of the batch the chunk has.

    Args:
        error: counts samples from the first of the chunk.
        first: the number of that sample in the batch.
        samples: of the chunk.
    """
    if first:
        where = f"sample {first}" if samples == 1 else f"samples {first} to {first + samples - 1}"
        error.args = (f"{where} of the batch (sample 0 below is sample {first}): {error}", *error.args[1:])
    return error


def sample_count(tensors: Tensors) -> int:
    """The number of samples of a request without shared features."""
    return tensors.lengths.size // len(tensors.features or ())
