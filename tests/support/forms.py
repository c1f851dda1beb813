"""The forms that public rankers bring: signatures and habits, each as a small model.

The models are ours; whose habit each shows is in its docstring. What an example is: the arguments of one call, a tuple
of positional ones or a dict of those by name.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.forms_inputs import Example, Form
from tests.support.forms_of_answers import ANSWERS
from tests.support.forms_of_attention import ATTENTION
from tests.support.forms_of_calls import CALLS
from tests.support.forms_of_events import EVENTS
from tests.support.forms_of_habits import HABITS
from tests.support.forms_of_keys import KEYS
from tests.support.forms_of_numbers import NUMBERS
from tests.support.forms_of_sequences import SEQUENCES


def forms() -> dict[str, Form]:
    """All forms by name: what makes the module, and what makes an example of some samples for it."""
    every: dict[str, Form] = {}
    for group in (CALLS, NUMBERS, ANSWERS, KEYS, HABITS, SEQUENCES, ATTENTION, EVENTS):
        if twice := every.keys() & group.keys():
            raise ValueError(f"forms: two are called {min(twice)!r}")
        every |= group
    return every


def module_of(name: str) -> nn.Module:
    """The module of a form, in eval mode. Each call makes an equal one."""
    torch.manual_seed(0)
    make, _ = forms()[name]
    return make().eval()


def example_of(name: str, samples: int, seed: int = 0) -> Example:
    _, make = forms()[name]
    return make(np.random.default_rng((seed, samples)), samples)


def call(module: nn.Module, example: Example) -> Any:
    """What a module answers by itself to an example."""
    with torch.no_grad():
        return module(**example) if isinstance(example, dict) else module(*example)
