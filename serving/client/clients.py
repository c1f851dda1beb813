"""LookupClient, and AsyncLookupClient for asyncio: they differ in how they wait, and in nothing else."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from serving.client.answer import Answer, ModelInfo
from serving.client.connection import DEFAULT_TIMEOUT_S, Closing, Connection, Metadata, Tls, check_timeout
from serving.client.exchange import Exchange, Steps
from serving.client.meaning import error_of
from serving.client.retries import Pause, Retries, Tries, Try, tried
from serving.encoding import Features
from serving.errors import InvalidRequest, RequestCancelled, ServingError

T = TypeVar("T")


class _Client:
    """What both clients share.

    Args:
        addresses: "host:port" of the server, or of several: calls go to each in turn. One name may stand for many
            servers; it is resolved again when they change.
        model: the model's name.
        timeout_s: deadline of each call, retries and all.
        retries: what is tried again; `Retries(attempts=1)` for nothing.
        tls: certificates; in the clear where None.
        metadata: sent with each call, such as {"authorization": "Bearer …"}; a function is asked each time.
        shared_memory: whether answers come through /dev/shm, for a client on the server's own host. One address.

    Raises:
        InvalidRequest: an argument cannot be used; says which.
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
        shared_memory: bool = False,
    ) -> None:
        self._connection = Connection(
            addresses=[addresses] if isinstance(addresses, str) else list(addresses),
            timeout_s=timeout_s,
            retries=retries or Retries(),
            tls=tls,
            metadata=metadata or {},
        )
        if shared_memory and len(self._connection.addresses) > 1:
            raise InvalidRequest("shared_memory: expected one address: a server sees its own host's memory alone")
        self._where = f"{','.join(self._connection.addresses)}: model {model!r}"
        self._exchange = Exchange(self._where, model, shared_memory)
        self._closed = False
        self._channel = self._connection.channel(self._library())
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _library(self) -> Any:
        raise NotImplementedError

    def _sleep(self, seconds: float) -> Any:
        raise NotImplementedError

    def _deadline(self, timeout_s: float | None) -> float:
        if self._closed:
            raise RequestCancelled(f"{self._where}: the client is closed")
        if timeout_s is not None and not timeout_s <= 0:  # a deadline that has passed is gRPC's to tell
            check_timeout(timeout_s)
        return time.monotonic() + (self._connection.timeout_s if timeout_s is None else timeout_s)

    def _tries(self, steps: Steps[T], deadline: float) -> Tries[T]:
        return tried(steps, self._connection.retries, deadline, self._connection.elsewhere)

    def _do(self, step: Try | Pause, trace: str | None) -> Any:
        """Start a call or a pause: its result, or with asyncio what to wait for."""
        if isinstance(step, Pause):
            return self._sleep(step.seconds)
        metadata = self._connection.call_metadata(trace)
        return getattr(self._stub, step.call.method)(step.call.request, timeout=step.timeout_s, metadata=metadata)

    def _error(self, error: grpc.RpcError) -> ServingError:
        return error_of(error.code().name, error.details() or "", f"{self._where}: ")


class LookupClient(_Client, Closing):
    """A client of one model. Safe to use from several threads; keeps one channel."""

    def info(self) -> ModelInfo:
        """Features and dims, read from the model's config on first use.

        Raises:
            ServingError: the server cannot be reached, or the model is not one that tbe-export made.
        """
        return self._run(self._exchange.info(), self._deadline(None), None)

    def lookup(self, features: Features, *, timeout_s: float | None = None, trace: str | None = None) -> Answer:
        """Pooled embeddings of B samples.

        Args:
            features: ids by feature, any of the model's features in any order: a list of bags, or a pair of
                arrays (values [N_f], lengths [B]), or (values, lengths, weights [N_f]) for weighted models;
                or a torchrec KeyedJaggedTensor.
            timeout_s: deadline of this call; the client's where None.
            trace: the W3C `traceparent` that the server is to keep with this request.

        Returns:
            {feature: [B, dim]}, float32 or float16 as the model was exported, in the order given. The arrays
            are views of one answer.

        Raises:
            InvalidRequest: the ids, lengths, weights or names cannot be answered; says which and why.
            DeadlineExceeded: no answer in time.
            ServerUnavailable: nobody listens at the address, the model is not ready, or its queue is full.
            ServingError: any other of `serving.errors`.
        """
        return self._run(self._exchange.lookup(features), self._deadline(timeout_s), trace)

    def close(self) -> None:
        """Close the channel."""
        if not self._closed:
            with suppress(ServingError):  # a server that is gone has forgotten all by itself
                self._run(self._exchange.close(), self._deadline(None), None)
            self._closed = True
            self._channel.close()

    def _library(self) -> Any:
        return grpc

    def _sleep(self, seconds: float) -> Any:
        time.sleep(seconds)

    def _run(self, steps: Steps[T], deadline: float, trace: str | None) -> T:
        tries = self._tries(steps, deadline)
        resume: Callable[[Any], Try | Pause] = tries.send
        result: Any = None
        while True:
            try:
                step = resume(result)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            try:
                resume, result = tries.send, self._do(step, trace)
            except grpc.RpcError as error:
                resume, result = tries.throw, self._error(error)


class AsyncLookupClient(_Client):
    """LookupClient for asyncio, to be made and used in one event loop: many lookups at once, without threads."""

    async def info(self) -> ModelInfo:
        """As `LookupClient.info`."""
        return await self._run(self._exchange.info(), self._deadline(None), None)

    async def lookup(self, features: Features, *, timeout_s: float | None = None, trace: str | None = None) -> Answer:
        """As `LookupClient.lookup`."""
        return await self._run(self._exchange.lookup(features), self._deadline(timeout_s), trace)

    async def close(self) -> None:
        """As `LookupClient.close`."""
        if not self._closed:
            with suppress(ServingError):
                await self._run(self._exchange.close(), self._deadline(None), None)
            self._closed = True
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _library(self) -> Any:
        return grpc.aio

    def _sleep(self, seconds: float) -> Any:
        return asyncio.sleep(seconds)

    async def _run(self, steps: Steps[T], deadline: float, trace: str | None) -> T:
        tries = self._tries(steps, deadline)
        resume: Callable[[Any], Try | Pause] = tries.send
        result: Any = None
        while True:
            try:
                step = resume(result)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            try:
                resume, result = tries.send, await self._do(step, trace)
            except grpc.RpcError as error:
                resume, result = tries.throw, self._error(error)
