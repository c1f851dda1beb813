"""A stream of batches: each becomes requests within the server's limits, whose answers are joined again.

Both clients share it. As in a session, its coroutines make calls by a function of the client.
"""

from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from serving.arguments import check_argument, check_timeout
from serving.client.messages import Answer, Scores
from serving.client.model_info import ModelInfo
from serving.client.session import MakeCall, Session
from serving.errors import ConfigurationError, ServerUnavailable, ServingError
from serving.requests.chunks import chunk_limits, cut, joined
from serving.requests.input_forms import Nulls
from serving.requests.streams import (
    Errors,
    Method,
    SamplesDone,
    check_stream,
    name_batch,
    name_chunk,
    sample_count,
)
from serving.requests.types import Tensors

IN_FLIGHT = 4
_MAX_IN_FLIGHT = 1024
# How often the chunks of a batch are sent again because several model versions answered it.
_ATTEMPTS = 3


class Request(NamedTuple):
    """A request to a model."""

    info: ModelInfo
    tensors: Tensors


class Chunk(NamedTuple):
    """A request for some samples of a batch, or the error that the batch cannot be encoded with.

    Attributes:
        batch: the number of the batch.
        first: the first sample.
        request: the request, or the error.
        is_last: whether the batch ends with this chunk.
    """

    batch: int
    first: int
    request: Request | ServingError
    is_last: bool


class Answered(NamedTuple):
    """A chunk and its answer."""

    chunk: Chunk
    answer: Answer | Scores | ServingError


class AnswerStream:
    """The batches of one stream. Its arguments are those of `LookupClient.stream`.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    def __init__(
        self,
        session: Session,
        batches: Iterable[Any] | AsyncIterable[Any],
        method: Method,
        *,
        outputs: Collection[str] | None,
        nulls: Nulls,
        errors: Errors,
        in_flight: int,
        timeout_s: float,
        progress: SamplesDone,
    ) -> None:
        check_stream([] if isinstance(batches, AsyncIterable) else batches, method, errors)
        if method == "lookup" and outputs is not None:
            raise ConfigurationError('outputs: expected None for lookups, which have no scores: method="score"')
        check_argument("in_flight", in_flight, int)
        if not 1 <= in_flight <= _MAX_IN_FLIGHT:
            raise ConfigurationError(f"in_flight: expected 1 to {_MAX_IN_FLIGHT}, got {in_flight}")
        check_timeout(timeout_s)
        self.in_flight = in_flight
        self.timeout_s = timeout_s
        self._session = session
        self._batches = batches
        self._method: Method = method
        self._outputs = outputs
        self._nulls: Nulls = nulls
        self._errors = errors
        self._progress = progress
        self._samples = 0
        self._batch: list[Answered] = []
        self._read_error: Exception | None = None

    def read(self) -> Iterator[Any]:
        """The batches, until reading one fails. `finish` raises the error, after the answers to earlier batches."""
        batches: Any = self._batches
        try:
            yield from batches
        except Exception as error:
            self._read_error = error

    async def read_async(self) -> AsyncIterator[Any]:
        """As `read`, of either kind of iterable."""
        if not isinstance(self._batches, AsyncIterable):
            for batch in self.read():
                yield batch
            return
        try:
            async for batch in self._batches:
                yield batch
        except Exception as error:
            self._read_error = error

    def finish(self) -> None:
        """Raise the error of `read`, if there was one."""
        if self._read_error is not None:
            raise self._read_error

    async def chunks(self, call: MakeCall, number: int, batch: Any) -> Iterator[Chunk]:
        """Encode a batch, and cut it into requests. An error of the batch is its only chunk."""
        try:
            info, tensors = await self._session.batch(call, batch, self._method, self._outputs, self._nulls)
            limits = chunk_limits([*info.dims.values()], info.max_request_samples, info.max_request_ids)
            return _chunks(number, info, cut(tensors, limits, info.by_id))
        except ServingError as error:
            return iter([Chunk(number, 0, error, is_last=True)])

    async def answer(self, call: MakeCall, chunk: Chunk) -> Answered:
        """Send a chunk. An error is its answer: it counts at the place of its batch."""
        if isinstance(chunk.request, ServingError):
            return Answered(chunk, chunk.request)
        try:
            info, tensors = chunk.request
            return Answered(chunk, await self._session.answer(call, tensors, info, self._method))
        except ServingError as error:
            return Answered(chunk, name_chunk(error, chunk.first, sample_count(tensors)))

    async def join(self, call: MakeCall, answered: Answered) -> list[Any]:
        """Add the answer to the next chunk. Returns the answer to its batch if the chunk is the last one.

        Raises:
            ServingError: of the batch, unless errors are yielded.
        """
        self._batch.append(answered)
        if not answered.chunk.is_last:
            return []
        chunks, self._batch = self._batch, []
        try:
            answer = await self._joined(call, chunks)
        except ServingError as error:
            named = name_batch(error, answered.chunk.batch)
            if self._errors == "raise":
                raise
            return [named]
        self._samples += sum(
            sample_count(chunk.request.tensors) for chunk, _ in chunks if isinstance(chunk.request, Request)
        )
        self._progress(self._samples)
        return [answer]

    async def _joined(self, call: MakeCall, chunks: list[Answered]) -> Answer | Scores:
        for _ in range(_ATTEMPTS):
            answers = []
            for _, answer in chunks:
                if isinstance(answer, ServingError):
                    raise answer
                answers.append(answer)
            newest = max(answer.version for answer in answers)
            if all(answer.version == newest for answer in answers):
                if len(answers) == 1:
                    return answers[0]
                lengths = joined([answer.lengths for answer in answers])
                return type(answers[0])(joined(answers), newest, lengths)
            chunks = [
                answered if answer.version == newest else await self.answer(call, answered.chunk)
                for answered, answer in zip(chunks, answers, strict=True)
            ]
        versions = ", ".join(map(str, sorted({answer.version for answer in answers})))
        raise ServerUnavailable(f"expected one model version for all of a batch, got answers of versions {versions}")


def _chunks(number: int, info: ModelInfo, requests: Iterator[Tensors]) -> Iterator[Chunk]:
    tensors, first = next(requests), 0
    for following in requests:
        yield Chunk(number, first, Request(info, tensors), is_last=False)
        first += sample_count(tensors)
        tensors = following
    yield Chunk(number, first, Request(info, tensors), is_last=True)
