"""Names of models that Kubernetes does not take are mapped, and collisions are refused by name."""

import pytest

from export.kubernetes.names import check_names, kubernetes_name
from serving.errors import ConfigurationError


@pytest.mark.parametrize(
    ("model", "expected"),
    [("movies", "movies"), ("Movies.V2_big", "movies-v2-big"), ("_m_", "m"), ("a..b", "a--b"), ("m-1", "m-1")],
)
def test_a_model_s_name_is_mapped(model: str, expected: str) -> None:
    assert kubernetes_name(model, None) == expected


@pytest.mark.parametrize(
    ("model", "name", "said"),
    [
        ("7days", None, "model '7days': expected a name that Kubernetes takes"),
        ("___", None, "got ''"),
        ("movies", "Movies", "--name: expected .* got 'Movies'"),
        ("movies", "m.v2", "--name"),
        ("movies", "m\n", "--name"),
        ("movies", "", "--name"),
    ],
)
def test_a_name_that_kubernetes_does_not_take_is_refused(model: str, name: str | None, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        kubernetes_name(model, name)


def test_a_name_of_two_models_is_refused_by_both() -> None:
    with pytest.raises(
        ConfigurationError, match=r"movies-v2: .* got the name of model 'movies\.v2' of the same repository"
    ):
        check_names(["movies-v2", "movies-v2-host-0"], ["other", "movies.v2"])
    with pytest.raises(ConfigurationError, match="movies-host-0: expected a name of its own"):
        check_names(["movies", "movies-host-0"], ["Movies-host_0"])
    check_names(["movies"], ["movies-2"])


def test_a_name_too_long_for_a_stateful_set_is_refused() -> None:
    check_names(["a" * 52], [])
    with pytest.raises(ConfigurationError, match="expected at most 52 letters, got 53"):
        check_names(["a" * 53], [])
