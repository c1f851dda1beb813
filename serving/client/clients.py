"""LookupClient, and AsyncLookupClient for asyncio. They differ only in how they wait.

What they share is written as coroutines. Those of LookupClient block where others wait, so they end at once.
"""

import asyncio
import time
from collections.abc import Collection, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
import numpy.typing as npt

from serving.arguments import check_argument, check_timeout
from serving.client.channels import LiveChannel
from serving.client.connection import DEFAULT_TIMEOUT_S, Connection, Tls
from serving.client.exchange import Ask, Call, Exchange
from serving.client.forks import calling
from serving.client.messages import Answer, ModelInfo, Scores
from serving.client.metadata import Metadata
from serving.client.retries import Retries, with_retries
from serving.closing import AsyncClosing, Closing
from serving.errors import InternalError, RequestCancelled
from serving.protocol.messages import unary
from serving.requests.dense_inputs import NO_DENSE, DenseFeatures
from serving.requests.encoding import Features
from serving.requests.types import Embeddings

T = TypeVar("T")


class _Client:
    """What both clients share.

    Args:
        addresses: "host:port" of the server. With several addresses, calls go to each in turn. One name may stand for
            many servers; it is resolved again when they change.
        model: the model's name.
        timeout_s: deadline of each lookup in seconds, retries included.
        retries: what is tried again. None: `Retries()`. `Retries(attempts=1)`: nothing.
        tls: certificates. None: no TLS.
        metadata: sent with each call, such as {"authorization": "Bearer …"}. A function is called for each call. Keys
            are ASCII letters, digits, "_", "." and "-"; values are printable ASCII, or bytes where the key ends in
            "-bin".

    Raises:
        ConfigurationError: an argument cannot be used.
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
        self._exchange = Exchange(self._where, model)
        self._closed = False
        self._channel = LiveChannel(self._connection, self._library(), _methods)

    def __reduce__(self) -> tuple[Any, ...]:
        """A client that is pickled, as for another process, is one with the same arguments there."""
        return _made_again, (type(self), self._model, self._connection)

    def _library(self) -> Any:
        raise NotImplementedError

    async def _response(self, started: Any) -> Any:
        """The response of a call that was started."""
        raise NotImplementedError

    async def _pause(self, seconds: float) -> None:
        raise NotImplementedError

    def _deadline(self, timeout_s: float | None) -> float:
        if self._closed:
            raise self._is_closed()
        if timeout_s is not None:
            check_argument("timeout_s", timeout_s, float)
            if not timeout_s <= 0:  # a deadline that has passed is gRPC's to tell
                check_timeout(timeout_s)
        return time.monotonic() + (self._connection.timeout_s if timeout_s is None else timeout_s)

    def _ask(self, timeout_s: float | None = None, trace: str | None = None) -> Ask:
        """What makes calls from now until the deadline, each as often as `retries` says."""
        deadline = self._deadline(timeout_s)
        connection = self._connection

        async def ask(call: Call) -> Any:
            attempt = partial(self._attempt, call, trace)
            return await with_retries(attempt, self._pause, connection.retries, deadline, connection.elsewhere)

        return ask

    async def _attempt(self, call: Call, trace: str | None, timeout_s: float) -> Any:
        metadata = self._connection.call_metadata(trace)
        method = self._channel.methods(timeout_s)[call.method]
        try:
            with calling():
                return await self._response(method(call.request, timeout=timeout_s, metadata=metadata))
        except grpc.RpcError as error:
            where, is_known = f"{self._where}: ", self._exchange.is_known
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


def _made_again(kind: type[_Client], model: str, connection: Connection) -> _Client:
    return kind(
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
    """A client of one model, with one channel. Several threads may use it at once.

    In a forked child it makes a connection of its own, unless the parent was in a call at the fork.
    """

    def info(self) -> ModelInfo:
        """Features and dims of the model. They are asked for once.

        Raises:
            InternalError: the model is not one that tbe-export made.
            ServingError: the server cannot be reached, or does not have the model.
        """
        return _result(self._exchange.info(self._ask()))

    def lookup(
        self,
        features: Features,
        *,
        shared: Collection[str] = (),
        timeout_s: float | None = None,
        trace: str | None = None,
        every_host: bool = False,
    ) -> Answer:
        """Embeddings of B samples.

        Args:
            features: ids by feature: any of the model's features, in any order. The ids of a feature are one of:
                a list of B bags, each a list or array of ids, such as [[3, 5], []];
                a tuple of arrays, (values int64 [N_f], lengths int32 [B]); for features whose ids carry weights
                (values, lengths, weights float32 [N_f]). A tuple is never one of bags;
                a dict of the same arrays, {"values": …, "lengths": …, "weights": …}.
                A torchrec KeyedJaggedTensor is taken, too.
            shared: the features that have one bag, whatever the number of samples, such as those of the user in
                ranking: they are sent, looked up and answered once, [1, dim].
            timeout_s: deadline of this lookup in seconds. None: the client's.
            trace: a W3C `traceparent`, which the server keeps with this request. None: that of OpenTelemetry's
                current span, if the program uses that.
            every_host: answer only if every host of a router does, also those of which no row is needed.

        Returns:
            {feature: [B, dim]} in the order asked for; float32 or float16, as the model was exported. A feature of an
            EmbeddingCollection is not pooled: it has `JaggedRows`, with a row for each id. The arrays are read-only
            views of one answer.

        Raises:
            InvalidRequest: ids, lengths, weights or names cannot be answered.
            ConfigurationError: `timeout_s` cannot be waited for, or gRPC cannot send `trace` or what `metadata` gave.
            DeadlineExceeded: no answer in time.
            ServerUnavailable: nobody listens at the address, the model is not ready, or the server sheds load.
            RequestCancelled: the client is closed.
            ServingError: any other error of the server.
        """
        return _result(
            self._exchange.lookup(self._ask(timeout_s, trace), features, shared=shared, every_host=every_host)
        )

    def score(
        self,
        features: Features,
        dense: DenseFeatures = NO_DENSE,
        *,
        outputs: Collection[str] | None = None,
        shared: Collection[str] = (),
        timeout_s: float | None = None,
        trace: str | None = None,
    ) -> Scores:
        """What the whole model answers for B samples. It was exported with scores.

        Args:
            features: ids of all features, as `lookup` takes them.
            dense: the dense inputs of the model's forward by name, [B, *shape] each: lists or arrays of numbers, of
                integers or of booleans, as the model takes them.
            outputs: the names of those that are wanted; all where None.
            shared: the features that have one bag, and dense inputs that have one row: they count for all samples.
            timeout_s: deadline in seconds. None: the client's.
            trace: a W3C `traceparent`, which the server keeps with this request. None: that of OpenTelemetry's
                current span, if the program uses that.

        Returns:
            {output: [B, …]}, in the order of the model or of `outputs`, each in the dtype of the output. The arrays
            are read-only.

        Raises:
            InvalidRequest: ids, dense inputs or names cannot be answered, or the model has no scores.
            ServingError: as `lookup`.
        """
        return _result(self._exchange.score(self._ask(timeout_s, trace), features, dense, outputs, shared=shared))

    def rows(
        self, table: str, ids: npt.ArrayLike, *, timeout_s: float | None = None, trace: str | None = None
    ) -> Embeddings:
        """Rows of a table, as they are stored: not pooled, and without weights.

        Args:
            table: its name.
            ids: integers [n].
            timeout_s: as `lookup`.
            trace: as `lookup`.

        Returns:
            [n, dim], float32 or float16; read-only. Ids outside the table are answered as its id policy says: `zero`
            gives zeros.

        Raises:
            ServingError: as `lookup`.
        """
        return _result(self._exchange.rows(self._ask(timeout_s, trace), table, ids))

    def close(self) -> None:
        """Close the channel."""
        self._closed = True
        self._channel.close()

    def _library(self) -> Any:
        return grpc

    async def _response(self, started: Any) -> Any:
        return started  # grpc has waited for it

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)  # nothing else runs here


class AsyncLookupClient(_Client, AsyncClosing):
    """LookupClient for asyncio: many lookups at once without threads.

    Use it in one event loop, and not in a forked child.
    """

    async def info(self) -> ModelInfo:
        """As `LookupClient.info`."""
        return await self._exchange.info(self._ask())

    async def lookup(
        self,
        features: Features,
        *,
        shared: Collection[str] = (),
        timeout_s: float | None = None,
        trace: str | None = None,
        every_host: bool = False,
    ) -> Answer:
        """As `LookupClient.lookup`."""
        return await self._exchange.lookup(
            self._ask(timeout_s, trace), features, shared=shared, every_host=every_host
        )

    async def score(
        self,
        features: Features,
        dense: DenseFeatures = NO_DENSE,
        *,
        outputs: Collection[str] | None = None,
        shared: Collection[str] = (),
        timeout_s: float | None = None,
        trace: str | None = None,
    ) -> Scores:
        """As `LookupClient.score`."""
        return await self._exchange.score(self._ask(timeout_s, trace), features, dense, outputs, shared=shared)

    async def rows(
        self, table: str, ids: npt.ArrayLike, *, timeout_s: float | None = None, trace: str | None = None
    ) -> Embeddings:
        """As `LookupClient.rows`."""
        return await self._exchange.rows(self._ask(timeout_s, trace), table, ids)

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
            raise self._is_closed() from None  # gRPC cancels what is awaited when its channel is closed
        if response is None:  # grpc raises an error of it, and grpc.aio does not
            raise InternalError(f"{self._where}: expected a message of KServe's protocol, got other bytes")
        return response

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _result(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise RuntimeError("a coroutine of LookupClient waited")
