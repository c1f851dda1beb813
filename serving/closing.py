"""Base classes of context managers that close themselves."""

from types import TracebackType
from typing import Self


class Closing:
    """A context manager that closes itself when its `with` block ends."""

    def close(self) -> None:
        """Release what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClosing:
    """A context manager that closes itself when its `async with` block ends."""

    async def close(self) -> None:
        """Release what it holds."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
