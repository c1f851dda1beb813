"""Random numbers of torch that a dense part draws in eval mode."""

from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from export.capture.graph_nodes import draws_random_numbers
from export.errors import ModelError


class RandomDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, records the operators that draw random numbers.

    Comparing answers would miss draws that are small, or that matter for some requests alone.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_random_numbers(func, args, kwargs or {}):
            self._operators.append(str(func))
        return func(*args, **(kwargs or {}))

    def expect_none(self, model: nn.Module) -> None:
        """Refuse a model whose dense part drew random numbers.

        Raises:
            ModelError: naming the operator.
        """
        if self._operators:
            raise ModelError(
                f"{type(model).__name__}: what follows the collections draws random numbers in eval mode, by "
                f"{self._operators[0]}: expected none, as no two of its answers are the same: draw them "
                "`if self.training`"
            )
