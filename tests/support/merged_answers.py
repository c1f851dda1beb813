"""What requests that come together are answered, without a server."""

from pathlib import Path
from typing import Any

import pytest

from serving.backend.answering import Answerer
from serving.engine import Engine
from serving.model.settings import ServingSettings
from serving.requests.limits import Limits
from serving.requests.types import Tensors
from tests.serving.backend.test_answering import counting


def merged_answers(bundle: Path, requests: list[Tensors], limits: Limits | None = None) -> list[Any]:
    """The outcomes of requests that come together."""
    engine = Engine.open(bundle)
    metrics = counting({}, [table.name for table in engine.bundle.manifest.tables])
    answerer = Answerer(engine, limits or ServingSettings(), metrics, None, pytest.fail, lambda _: None)
    return answerer.answer(requests, lambda tensors: tensors, lambda _: False)
