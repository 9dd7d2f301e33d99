"""The security options, the same on every command that speaks to others.

They are written to the environment, where `stagemesh.rpc.security` and child processes find them.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Command = TypeVar("Command", bound=Callable[..., Any])

_PANEL = "Security"
_PRESENT: dict[str, tuple[str, str, str]] = {
    "tls_ca": ("STAGEMESH_TLS_CA", "FILE", "Authorities to trust (PEM). Connections then speak TLS."),
    "tls_cert": ("STAGEMESH_TLS_CERT", "FILE", "Certificate chain to present (PEM); needs --tls-key."),
    "tls_key": ("STAGEMESH_TLS_KEY", "FILE", "Its private key (PEM)."),
    "tls_server_name": ("STAGEMESH_TLS_SERVER_NAME", "NAME", "Name that the peer's certificate must have."),
    "token_file": ("STAGEMESH_TOKEN_FILE", "FILE", "File with the token to present."),
}
_SERVE: dict[str, tuple[str, str, str]] = {
    "tokens": ("STAGEMESH_TOKENS", "FILE", "Tokens that callers may present, a line each: ROLE TOKEN [EXPIRY]."),
}


def with_security(*, serves: bool = False) -> Callable[[Command], Command]:
    """Give a command the security options.

    Args:
        serves: it also listens: adds --tokens and --insecure.
    """

    def decorate(command: Command) -> Command:
        options = {**_PRESENT, **(_SERVE if serves else {})}

        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> Any:
            for name, (variable, _, _) in options.items():
                if (value := kwargs.pop(name)) is not None:
                    os.environ[variable] = str(value)
            if serves and kwargs.pop("insecure"):
                os.environ["STAGEMESH_INSECURE"] = "1"
            return command(*args, **kwargs)

        signature = inspect.signature(command, eval_str=True)
        added = [_parameter(name, *spec) for name, spec in options.items()]
        if serves:
            added.append(_insecure())
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), *added]
        )
        run.__annotations__ = {
            parameter.name: parameter.annotation
            for parameter in run.__signature__.parameters.values()  # type: ignore[attr-defined]
        }
        return run  # type: ignore[return-value]

    return decorate


def _parameter(name: str, variable: str, metavar: str, text: str) -> inspect.Parameter:
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        metavar=metavar,
        help=f"{text} [dim]\\[env: {variable}][/]",
        rich_help_panel=_PANEL,
    )
    kind: Any = Path if metavar == "FILE" else str
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _insecure() -> inspect.Parameter:
    option = typer.Option(
        "--insecure", help="Listen wider than this machine without TLS. [dim]\\[env: STAGEMESH_INSECURE][/]",
        rich_help_panel=_PANEL,
    )  # fmt: skip
    return inspect.Parameter(
        "insecure", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )
