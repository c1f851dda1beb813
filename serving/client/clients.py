"""LookupClient, and AsyncLookupClient for asyncio. They differ only in how they wait.

Their shared code is coroutines. LookupClient's coroutines block instead of awaiting, so they finish in one step.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Collection, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
import numpy.typing as npt

from serving.arguments import check_argument, check_timeout
from serving.client.channels import LiveChannel
from serving.client.connection import DEFAULT_TIMEOUT_S, Connection, Tls
from serving.client.forks import calling
from serving.client.messages import Answer, Scores
from serving.client.metadata import Metadata
from serving.client.model_info import ModelInfo
from serving.client.retries import Retries, with_retries
from serving.client.session import Call, MakeCall, Session
from serving.client.streams import IN_FLIGHT, Answered, AnswerStream, Chunk
from serving.closing import AsyncClosing, Closing
from serving.errors import DeadlineExceeded, InternalError, RequestCancelled
from serving.ordered_map import map_in_order
from serving.protocol.messages import unary
from serving.requests.dense_inputs import NO_DENSE, DenseFeatures
from serving.requests.encoding import Features
from serving.requests.input_forms import Nulls
from serving.requests.streams import STREAM_TIMEOUT_S, Errors, Method, SamplesDone
from serving.requests.types import Embeddings

T = TypeVar("T")
# A call that ends with DEADLINE_EXCEEDED so much before its deadline was ended by the server.
_EARLY_S = 0.1


class _Client:
    """The base of both clients.

    Args:
        addresses: "host:port" of the server. Calls are spread over several addresses in turn. A name may resolve to
            many servers; it is resolved again when they change.
        model: the model's name.
        timeout_s: deadline of each call in seconds, including its retries.
        retries: how failed calls are retried. None: `Retries()`. `Retries(attempts=1)` retries nothing.
        tls: certificates. None: no TLS.
        metadata: gRPC metadata of each call, such as {"authorization": "Bearer …"}, or a function that returns it for
            each call. Keys are ASCII letters, digits, "_", "." and "-". Values are printable ASCII, or bytes if the
            key ends in "-bin".

    Raises:
        ConfigurationError: an argument is invalid.
        ServerUnavailable: one name among several addresses cannot be resolved.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        model: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        retries: Retries | None = None,
        tls: Tls | None = None,
        metadata: Metadata | None = None,
    ) -> None:
        check_argument("addresses", addresses, str | Sequence[str])
        check_argument("model", model, str)
        self._connection = Connection(
            addresses=[addresses] if isinstance(addresses, str) else list(addresses),
            timeout_s=timeout_s,
            retries=Retries() if retries is None else retries,
            tls=tls,
            metadata={} if metadata is None else metadata,
        )
        self._model = model
        self._where = f"{','.join(self._connection.addresses)}: model {model!r}"
        self._session = Session(self._where, model)
        self._closed = False
        self._channel = LiveChannel(self._connection, self._library(), _methods)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: another process makes a client of its own from them."""
        return _unpickle, (type(self), self._model, self._connection)

    def _library(self) -> Any:
        raise NotImplementedError

    async def _response(self, started: Any) -> Any:
        """Wait for the response of a started call."""
        raise NotImplementedError

    async def _pause(self, seconds: float) -> None:
        raise NotImplementedError

    def _deadline(self, timeout_s: float | None) -> float:
        if self._closed:
            raise self._is_closed()
        if timeout_s is not None:
            check_argument("timeout_s", timeout_s, float)
            if not timeout_s <= 0:  # gRPC answers DEADLINE_EXCEEDED to a deadline in the past
                check_timeout(timeout_s)
        return time.monotonic() + (self._connection.timeout_s if timeout_s is None else timeout_s)

    def _caller(
        self, timeout_s: float | None = None, trace: str | None = None, *, is_patient: bool = False
    ) -> MakeCall:
        """Makes calls, with retries, until a deadline that starts now."""
        deadline = self._deadline(timeout_s)
        connection = self._connection

        async def make_call(call: Call) -> Any:
            attempt = partial(self._attempt, call, trace)
            try:
                return await with_retries(
                    attempt,
                    self._pause,
                    connection.retries,
                    deadline,
                    connection.has_other_servers,
                    is_patient=is_patient,
                )
            except DeadlineExceeded as error:
                if time.monotonic() < deadline - _EARLY_S:  # a server's own deadline
                    raise
                limit_s = connection.timeout_s if timeout_s is None else timeout_s
                advice = "give `timeout_s` to this call or the client, or send less at once"
                raise DeadlineExceeded(f"{error}: the deadline was {limit_s:g} s: {advice}") from None

        return make_call

    async def _attempt(self, call: Call, trace: str | None, timeout_s: float) -> Any:
        metadata = self._connection.call_metadata(trace)
        method = self._channel.methods(timeout_s)[call.method]
        try:
            with calling():
                return await self._response(method(call.request, timeout=timeout_s, metadata=metadata))
        except grpc.RpcError as error:
            where, is_known = f"{self._where}: ", self._session.is_known
            raise self._connection.error_of(error, where, is_known=is_known) from None
        except (
            ValueError,
            grpc.aio.UsageError,
        ):  # of a channel that another thread has closed
            if not self._closed:
                raise
            raise self._is_closed() from None

    def _is_closed(self) -> RequestCancelled:
        return RequestCancelled(f"{self._where}: the client is closed")


def _unpickle(client: type[_Client], model: str, connection: Connection) -> _Client:
    return client(
        connection.addresses,
        model,
        connection.timeout_s,
        retries=connection.retries,
        tls=connection.tls,
        metadata=connection.metadata,
    )


def _methods(channel: Any) -> dict[str, Any]:
    return {name: unary(channel, name) for name in ("ModelConfig", "ModelInfer")}


class LookupClient(_Client, Closing):
    """A client of one model, with one channel. Threads may share it.

    In a forked child it makes a connection of its own, unless the parent was in a call at the fork.
    """

    # `Features` and `DenseFeatures` are quoted: help() shows these names, not the long unions.

    def info(self) -> ModelInfo:
        """Features and dims of the model, which are fetched once.

        Raises:
            InternalError: the model was not exported by tbe-export.
            ServingError: the server cannot be reached, or does not have the model.
        """
        return _result(self._session.info(self._caller()))

    def lookup(
        self,
        features: "Features",
        *,
        nulls: Nulls = "refuse",
        shared: Collection[str] = (),
        timeout_s: float | None = None,
        trace: str | None = None,
        every_host: bool = False,
    ) -> Answer:
        """Look up the embeddings of B samples.

            answer = client.lookup({"genres": [[3, 5], []], "item_id": [7, 8]})
            answer["genres"]  # float32 [2, dim]
            client.lookup(df).to_polars()

        Args:
            features: ids by feature: any of the model's features, in any order. The ids of a feature are one of:
                a list of B bags, each a list or array of ids, such as [[3, 5], []];
                a list or array of B ids, if each sample has one;
                a column of B ids or B lists of ids: a pandas or polars Series, or a pyarrow Array or ChunkedArray;
                a tuple of arrays, (values int64 [N_f], lengths int32 [B]), and a third, weights float32 [N_f], if the
                feature's ids are weighted. A tuple is never read as bags;
                a dict of the same arrays, {"values": …, "lengths": …, "weights": …}.
                `features` may also be a DataFrame (pandas, polars, pyarrow Table or RecordBatch): its columns that
                have the names of features are taken. Or a torchrec KeyedJaggedTensor.
            nulls: "refuse" null lists and ids, or read a null list as an "empty" one, and leave null ids out.
            shared: the features that have one bag for all samples, such as the user's features in ranking. They are
                sent, looked up and returned once, [1, dim].
            timeout_s: deadline of this lookup in seconds. None: the client's.
            trace: a W3C `traceparent`, which the server records with this request. None: the traceparent of
                OpenTelemetry's current span, if the program uses OpenTelemetry.
            every_host: fail if any host of a router is down, even a host whose rows this lookup does not need.

        Returns:
            {feature: [B, dim]} in the order of `features`; float32 or float16, as exported. A feature of an
            EmbeddingCollection is not pooled: it has `JaggedRows`, with one row for each id. The arrays are read-only
            views of one response.

        Raises:
            InvalidRequest: the model cannot answer these ids, lengths, weights or names.
            ConfigurationError: `timeout_s` is invalid, or gRPC cannot send `trace` or the metadata.
            DeadlineExceeded: the deadline passed before the answer.
            ServerUnavailable: no server listens at the address, the model is not ready, or the server sheds load.
            RequestCancelled: the client is closed.
            ServingError: any other error of the server.
        """
        call = self._caller(timeout_s, trace)
        return _result(self._session.lookup(call, features, nulls=nulls, shared=shared, every_host=every_host))

    def score(
        self,
        features: "Features",
        dense: "DenseFeatures" = NO_DENSE,
        *,
        outputs: Collection[str] | None = None,
        nulls: Nulls = "refuse",
        shared: Collection[str] = (),
        timeout_s: float | None = None,
        trace: str | None = None,
    ) -> Scores:
        """Score B samples with the whole model, which must have been exported with `--scores`.

            client.score({"item_id": [7, 8], "genres": [[3, 5], []]}, dense={"price": [9.5, 3.0]})["scores"]
            client.score(df).to_polars()  # the columns of df have the names of features and dense inputs

        Args:
            features: ids of all features, in the forms of `lookup`. A DataFrame may have the dense inputs, too.
            dense: the dense inputs of the model's forward by name, [B, *shape] each: lists, arrays or columns of
                floats, integers or booleans, as the model expects. An input of one number may be [B] or [B, 1].
            nulls: as `lookup`, also of lists of rows of dense inputs. Null rows are refused.
            outputs: names of the outputs to return. None: all.
            shared: the features with one bag, and the dense inputs with one row, for all samples.
            timeout_s: as `lookup`.
            trace: as `lookup`.

        Returns:
            {output: [B, …]}, in the order of `outputs` or of the model, each in the dtype of its output. The arrays
            are read-only.

        Raises:
            InvalidRequest: the model cannot answer these ids, dense inputs or names, or has no scores.
            ServingError: as `lookup`.
        """
        call = self._caller(timeout_s, trace)
        return _result(self._session.score(call, features, dense, outputs, nulls=nulls, shared=shared))

    def rows(
        self, table: str, ids: npt.ArrayLike, *, timeout_s: float | None = None, trace: str | None = None
    ) -> Embeddings:
        """Dequantized rows of a table: not pooled and not weighted.

        Args:
            table: the table's name.
            ids: integers [n].
            timeout_s: as `lookup`.
            trace: as `lookup`.

        Returns:
            [n, dim], float32 or float16; read-only. The table's id policy applies to ids outside the table: `zero`
            returns rows of zeros.

        Raises:
            ServingError: as `lookup`.
        """
        return _result(self._session.rows(self._caller(timeout_s, trace), table, ids))

    def stream(
        self,
        batches: Iterable[Any],
        *,
        method: Method = "score",
        outputs: Collection[str] | None = None,
        nulls: Nulls = "refuse",
        errors: Errors = "raise",
        in_flight: int = IN_FLIGHT,
        timeout_s: float = STREAM_TIMEOUT_S,
        progress: SamplesDone = lambda _: None,
    ) -> Iterator[Any]:
        """Answer batches of any size, in order, several requests at a time.

            for scores in client.stream(parquet_file.iter_batches()):
                writer.write_table(scores.to_arrow())

        A batch is sent in requests of a few thousand samples, within the server's limits. One model version answers
        all of a batch. Batches are read as they are sent: no more than `in_flight` of them wait for their answers. If
        a model's scores depend on the other samples of a request, they depend on these requests.

        Args:
            batches: what `score` or `lookup` takes: a DataFrame, or ids by feature. For scores also a tuple
                (features, dense). No feature is shared.
            method: "score" or "lookup".
            outputs: names of the scores to return, as `score`. None: all.
            nulls: as `lookup`.
            errors: "raise" the error of a batch at its place, which ends the stream, or "yield" it and go on.
            in_flight: most requests that are sent and not yet answered.
            timeout_s: deadline of each request in seconds. Until then a request waits for a server that is overloaded
                or restarts, unless the client's `retries` has one attempt.
            progress: called after each batch with the number of samples that are answered.

        Yields:
            For each batch, what the method returns; or its ServingError.

        Raises:
            ServingError: as `score` and `lookup`; the message begins with the number of the batch, from 0.
            ConfigurationError: an argument is invalid.
            Exception: the error of `batches` itself, after the answers to the batches before it.
        """
        stream = AnswerStream(
            self._session,
            batches,
            method,
            outputs=outputs,
            nulls=nulls,
            errors=errors,
            in_flight=in_flight,
            timeout_s=timeout_s,
            progress=progress,
        )
        return self._streamed(stream)

    def _streamed(self, stream: AnswerStream) -> Iterator[Any]:
        def chunks() -> Iterator[Chunk]:
            for number, batch in enumerate(stream.read()):
                yield from _result(stream.chunks(self._caller(stream.timeout_s), number, batch))

        def answer(chunk: Chunk) -> Answered:
            return _result(stream.answer(self._caller(stream.timeout_s, is_patient=True), chunk))

        with ThreadPoolExecutor(stream.in_flight) as pool:
            for answered in map_in_order(pool, answer, chunks(), ahead=stream.in_flight - 1):
                yield from _result(stream.join(self._caller(stream.timeout_s, is_patient=True), answered))
        stream.finish()

    def close(self) -> None:
        """Close the channel and cancel its calls."""
        self._closed = True
        self._channel.close()

    def _library(self) -> Any:
        return grpc

    async def _response(self, started: Any) -> Any:
        return started  # grpc's call has already blocked

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)  # no event loop runs these coroutines


class AsyncLookupClient(_Client, AsyncClosing):
    """LookupClient for asyncio: concurrent lookups without threads.

    Use it in one event loop, and not in a forked child.
    """

    async def info(self) -> ModelInfo:
        """As `LookupClient.info`."""
        return await self._session.info(self._caller())

    async def lookup(
        self,
        features: "Features",
        *,
        nulls: Nulls = "refuse",
        shared: Collection[str] = (),
        timeout_s: float | None = None,
        trace: str | None = None,
        every_host: bool = False,
    ) -> Answer:
        """As `LookupClient.lookup`."""
        call = self._caller(timeout_s, trace)
        return await self._session.lookup(call, features, nulls=nulls, shared=shared, every_host=every_host)

    async def score(
        self,
        features: "Features",
        dense: "DenseFeatures" = NO_DENSE,
        *,
        outputs: Collection[str] | None = None,
        nulls: Nulls = "refuse",
        shared: Collection[str] = (),
        timeout_s: float | None = None,
        trace: str | None = None,
    ) -> Scores:
        """As `LookupClient.score`."""
        call = self._caller(timeout_s, trace)
        return await self._session.score(call, features, dense, outputs, nulls=nulls, shared=shared)

    async def rows(
        self, table: str, ids: npt.ArrayLike, *, timeout_s: float | None = None, trace: str | None = None
    ) -> Embeddings:
        """As `LookupClient.rows`."""
        return await self._session.rows(self._caller(timeout_s, trace), table, ids)

    def stream(
        self,
        batches: Iterable[Any] | AsyncIterable[Any],
        *,
        method: Method = "score",
        outputs: Collection[str] | None = None,
        nulls: Nulls = "refuse",
        errors: Errors = "raise",
        in_flight: int = IN_FLIGHT,
        timeout_s: float = STREAM_TIMEOUT_S,
        progress: SamplesDone = lambda _: None,
    ) -> AsyncIterator[Any]:
        """As `LookupClient.stream`, for `async for`. `batches` may be asynchronous."""
        stream = AnswerStream(
            self._session,
            batches,
            method,
            outputs=outputs,
            nulls=nulls,
            errors=errors,
            in_flight=in_flight,
            timeout_s=timeout_s,
            progress=progress,
        )
        return self._streamed(stream)

    async def _streamed(self, stream: AnswerStream) -> AsyncIterator[Any]:
        tasks: deque[asyncio.Task[Answered]] = deque()
        patient_caller = partial(self._caller, stream.timeout_s, is_patient=True)

        async def oldest_answers() -> Sequence[Any]:
            return await stream.join(patient_caller(), await tasks.popleft())

        number = 0
        try:
            async for batch in stream.read_async():
                for chunk in await stream.chunks(self._caller(stream.timeout_s), number, batch):
                    tasks.append(asyncio.create_task(stream.answer(patient_caller(), chunk)))
                    if len(tasks) == stream.in_flight:
                        for answer in await oldest_answers():
                            yield answer
                number += 1
            while tasks:
                for answer in await oldest_answers():
                    yield answer
            stream.finish()
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        """As `LookupClient.close`."""
        self._closed = True
        for closing in self._channel.close():
            await closing

    def _library(self) -> Any:
        return grpc.aio

    async def _response(self, started: Any) -> Any:
        try:
            response = await started
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise self._is_closed() from None  # closing a channel cancels its awaited calls
        if response is None:  # a response that cannot be parsed: grpc raises an error, grpc.aio returns None
            raise InternalError(f"{self._where}: expected a message of KServe's protocol, got other bytes")
        return response

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _result(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never awaits anything unfinished."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise RuntimeError("a coroutine of LookupClient waited")
