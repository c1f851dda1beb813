"""`tbe-serve status`: what servers serve, with what memory, and what happened to them."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from serving.client.connection import Connection
from serving.client.metadata import MetadataFile
from serving.client.retries import Retries
from serving.client.serves import ask_all, differences
from serving.commands.connection import DEFAULT_URL, TlsOf, say, takes_tls
from serving.commands.status_tables import fleet_table, status_tables
from serving.server.run_file import find_run_file
from serving.server.status import status_of
from serving.terminal.program import out


@takes_tls
def status(
    tls: TlsOf,
    address: Annotated[str, typer.Argument(help="The server's gRPC address.")] = DEFAULT_URL,
    fleet: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS[,ADDRESS]", help="Ask these servers which versions they serve, and compare."),
    ] = None,
    metadata: Annotated[
        Path | None,
        typer.Option(help="File with a JSON object of strings, such as a token, sent with each call to a fleet."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each question, in seconds.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a server serves. All of it for a server of yours on this machine, the versions for any other.

    Exits with 1, and says why, if a server does not answer, serves nothing, or serves other versions of a model than
    another server of the fleet.
    """
    run = None if fleet else find_run_file(address)
    if run is not None:
        found = status_of(run, timeout_s)
        if as_json:
            print(msgspec.json.encode(found).decode())
        else:
            for table in status_tables(found):
                out.print(table, end="\n\n")
        return
    asked = [each.strip() for some in fleet or [address] for each in some.split(",")]
    servers = ask_all(
        Connection(
            addresses=list(dict.fromkeys(asked)),
            timeout_s=timeout_s,
            retries=Retries(attempts=1),
            tls=tls(),
            metadata={} if metadata is None else MetadataFile(metadata)(),
        )
    )
    problems = list(differences(servers))
    if as_json:
        print(msgspec.json.encode({"servers": servers, "problems": problems}).decode())
    else:
        out.print(fleet_table(servers))
    for problem in problems:
        say(problem)
    raise typer.Exit(bool(problems))
