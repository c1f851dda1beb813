"""Where scores come from."""

import pytest

from serving.batch.sources import ServerSource
from serving.client import Scores
from serving.errors import ConfigurationError


def test_answers_of_another_version_than_at_the_start_are_refused() -> None:
    source = ServerSource("a:1", "ranker", None, 60.0, version=2)
    source.check_answer(Scores({}, 2))
    with pytest.raises(ConfigurationError, match=r"model 'ranker': expected answers of version 2, .*, got version 3"):
        source.check_answer(Scores({}, 3))
    assert source.identity() == {"server": "a:1", "model": "ranker", "version": "2"}
