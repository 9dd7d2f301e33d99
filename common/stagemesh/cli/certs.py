"""`stagemesh certs`: a private authority to try TLS with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Directory = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder of the authority and its certificates.")]
DEFAULT_DIRECTORY = Path("certs")

certs = typer.Typer(no_args_is_help=True, help="Make certificates of a private authority, to try TLS with.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(certs, name="certs")


@certs.command()
def init(
    hosts: Annotated[
        list[str] | None, typer.Argument(metavar="[HOST]...", help="Names and addresses that peers dial.")
    ] = None,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Make an authority, and a first certificate named [bold]mesh[/] for all processes.

    [bold]stagemesh certs init[/] head.example.org 10.0.0.1 10.0.0.2
    """
    from stagemesh.rpc.certificates import create_authority

    create_authority(directory)
    _issue(directory, "mesh", hosts or ["localhost", "127.0.0.1", "::1"])


@certs.command()
def issue(
    name: Annotated[str, typer.Argument(help="Name of the certificate: makes NAME.pem and NAME.key.")],
    hosts: Annotated[list[str], typer.Argument(metavar="HOST...", help="Names and addresses that peers dial.")],
    directory: Directory = DEFAULT_DIRECTORY,
    days: Annotated[int, typer.Option(min=1, help="Days that it is valid.")] = 90,
) -> None:
    """Issue a certificate, or a fresh one in the place of an old one: running processes take it up by themselves.

    [bold]stagemesh certs issue[/] painter-node 10.0.0.3
    """
    _issue(directory, name, hosts, days)


def _issue(directory: Path, name: str, hosts: list[str], days: int = 90) -> None:
    from stagemesh.rpc.certificates import issue_certificate

    certificate, key = issue_certificate(directory, name, hosts, days=days)
    print(f"made {certificate} and {key} for {', '.join(hosts)}")
    print(f"use them: --tls-ca {directory / 'ca.pem'} --tls-cert {certificate} --tls-key {key}")
