"""`tbe-serve health`: does a model answer? For exec probes."""

from typing import Annotated

import typer

from serving.client import DEFAULT_TIMEOUT_S, LookupClient, Retries
from serving.client.health import canary
from serving.commands.connection import DEFAULT_URL, TlsOf, UrlOption, takes_tls
from serving.terminal.program import out


@takes_tls
def health(
    models: Annotated[list[str], typer.Argument(help="The models that must answer.")],
    tls: TlsOf,
    url: UrlOption = DEFAULT_URL,
    timeout_s: Annotated[
        float, typer.Option(help="Deadline of each model's lookup, in seconds.")
    ] = DEFAULT_TIMEOUT_S,
) -> None:
    """Look a row up in every table of each model. Exits with 1, and says why, if one does not answer in time."""
    for model in models:
        with LookupClient(url, model, timeout_s, retries=Retries(attempts=1), tls=tls()) as client:
            out.print(f"{model}: version {canary(client).version} answers")
