"""`tbe-serve health`: for exec probes."""

from typing import Annotated

import typer

from serving.client import DEFAULT_TIMEOUT_S, LookupClient, Retries
from serving.commands.terminal import (
    DEFAULT_URL,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsServerNameOption,
    UrlOption,
    fail,
    out,
    tls_of,
)
from serving.errors import ServingError
from serving.health import canary


def health(
    models: Annotated[list[str], typer.Argument(help="The models that have to answer.")],
    url: UrlOption = DEFAULT_URL,
    timeout_s: Annotated[
        float, typer.Option(help="Deadline of each model's lookup, in seconds.")
    ] = DEFAULT_TIMEOUT_S,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_server_name: TlsServerNameOption = None,
) -> None:
    """Look a row up in every table of each model; exits with 1, and says why, if one does not answer in time."""
    tls = tls_of(tls_ca, tls_cert, tls_key, tls_server_name)
    try:
        for model in models:
            with LookupClient(url, model, timeout_s, retries=Retries(attempts=1), tls=tls) as client:
                out.print(f"{model}: version {canary(client).version} answers")
    except ServingError as error:
        fail(error)
