"""All named models, with the outcome that is expected of each: signatures and habits of public rankers.

The models are ours; the docstring of each says whose habit it shows. An example is the arguments of one call: a tuple of
positional ones, or a dict by name.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from tests.models.answers import ANSWERS
from tests.models.attention import ATTENTION
from tests.models.calls import CALLS
from tests.models.events import EVENTS
from tests.models.habits import HABITS
from tests.models.inputs import Example, NamedModel
from tests.models.keys import KEYS
from tests.models.numbers import NUMBERS
from tests.models.sequences import SEQUENCES


def _all_models() -> dict[str, NamedModel]:
    models: dict[str, NamedModel] = {}
    for group in (CALLS, NUMBERS, ANSWERS, KEYS, HABITS, SEQUENCES, ATTENTION, EVENTS):
        if shared_names := models.keys() & group.keys():
            raise ValueError(f"models: two are called {min(shared_names)!r}")
        models |= group
    return models


MODELS = _all_models()
REFUSED = {name: model.refused for name, model in MODELS.items() if model.refused}
SERVED = [name for name in MODELS if name not in REFUSED]


def module_of(name: str) -> nn.Module:
    """The module of a model, in eval mode. Each call makes an equal one."""
    torch.manual_seed(0)
    return MODELS[name].make().eval()


def example_of(name: str, samples: int, seed: int = 0) -> Example:
    return MODELS[name].example(np.random.default_rng((seed, samples)), samples)


def call(module: nn.Module, example: Example) -> Any:
    """What a module answers to an example."""
    with torch.no_grad():
        return module(**example) if isinstance(example, dict) else module(*example)
