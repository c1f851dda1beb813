"""One lookup by a client of its own."""

import asyncio
from collections.abc import Callable
from typing import Any

from serving.client import Answer, AsyncLookupClient, LookupClient

Lookup = Callable[..., Answer]


def lookup_sync(address: Any, features: Any = None, timeout_s: float = 20, **options: Any) -> Answer:
    with LookupClient(address, "m", timeout_s, **options) as client:
        return client.lookup({"x": [[1], [2]]} if features is None else features)


def lookup_async(address: Any, features: Any = None, timeout_s: float = 20, **options: Any) -> Answer:
    async def run() -> Answer:
        async with AsyncLookupClient(address, "m", timeout_s, **options) as client:
            return await client.lookup({"x": [[1], [2]]} if features is None else features)

    return asyncio.run(run())
