"""`tbe-serve health`: for exec probes."""

from typing import Annotated

import typer

from serving.client import DEFAULT_TIMEOUT_S, LookupClient, Retries
from serving.commands.terminal import DEFAULT_URL, TlsOf, UrlOption, takes_tls
from serving.health import canary
from serving.terminal import out


@takes_tls
def health(
    models: Annotated[list[str], typer.Argument(help="The models that have to answer.")],
    tls: TlsOf,
    url: UrlOption = DEFAULT_URL,
    timeout_s: Annotated[
        float, typer.Option(help="Deadline of each model's lookup, in seconds.")
    ] = DEFAULT_TIMEOUT_S,
) -> None:
    """Look a row up in every table of each model; exits with 1, and says why, if one does not answer in time."""
    for model in models:
        with LookupClient(url, model, timeout_s, retries=Retries(attempts=1), tls=tls()) as client:
            out.print(f"{model}: version {canary(client).version} answers")
