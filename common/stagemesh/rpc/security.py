"""Who may speak to whom: TLS files, bearer tokens with roles, and the rule about binding wider than loopback.

A process has one `Security`, taken from the environment (the command's flags write it there), so that the replicas a
node agent spawns have the same. Files are read again when they change; a broken file keeps the last good state.

Token file: one token a line, `ROLE TOKEN [EXPIRY]`, where ROLE is client, worker or operator and EXPIRY is an RFC 3339
time. Lines that start with # are comments.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from stagemesh.rpc.errors import MeshError, Reason

ENVIRONMENT = {
    "tls_cert": "STAGEMESH_TLS_CERT",
    "tls_key": "STAGEMESH_TLS_KEY",
    "tls_ca": "STAGEMESH_TLS_CA",
    "tls_server_name": "STAGEMESH_TLS_SERVER_NAME",
    "tokens": "STAGEMESH_TOKENS",
    "token_file": "STAGEMESH_TOKEN_FILE",
    "insecure": "STAGEMESH_INSECURE",
}
"""Field of `Security` -> environment variable."""


class Role(StrEnum):
    """What the holder of a token is."""

    CLIENT = "client"
    WORKER = "worker"
    OPERATOR = "operator"


class SecurityError(ValueError):
    """A security setting is wrong; the text says which and what would be right."""


@dataclass(frozen=True, slots=True)
class Security:
    """How this process proves who it is, and whom it trusts. All paths are PEM files unless said otherwise."""

    tls_cert: Path | None = None
    """Certificate chain of this process; with `tls_key` its servers speak TLS."""
    tls_key: Path | None = None
    tls_ca: Path | None = None
    """Authorities it trusts. Its channels then speak TLS, and its servers ask callers for a certificate."""
    tls_server_name: str | None = None
    """Name that peers' certificates must have, whatever address they are dialled at."""
    tokens: Path | None = None
    """Token file: what callers may present. Unset: callers need none."""
    token_file: Path | None = None
    """File whose first word is the token that this process presents."""
    insecure: bool = False
    """Bind wider than loopback without TLS."""

    @classmethod
    def from_environment(cls) -> Security:
        """The settings of this process. Raises SecurityError when they do not fit together."""
        values = {field: os.environ.get(name) or None for field, name in ENVIRONMENT.items()}
        path = {field: Path(text) if (text := values[field]) else None for field in values}
        security = cls(
            tls_cert=path["tls_cert"],
            tls_key=path["tls_key"],
            tls_ca=path["tls_ca"],
            tls_server_name=values["tls_server_name"],
            tokens=path["tokens"],
            token_file=path["token_file"],
            insecure=(values["insecure"] or "").lower() in {"1", "true", "yes"},
        )
        security.check()
        return security

    def check(self) -> None:
        """Refuse settings that cannot work, before anything is served."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SecurityError("--tls-cert and --tls-key go together: give both, or neither")
        for name in ("tls_cert", "tls_key", "tls_ca", "tokens", "token_file"):
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                raise SecurityError(f"--{name.replace('_', '-')}: {path}: cannot be read")
        if self.tokens is not None:
            read_tokens(self.tokens)

    @property
    def serves_tls(self) -> bool:
        """Whether servers of this process speak TLS."""
        return self.tls_cert is not None

    def own_token(self) -> str | None:
        """The token to present, read anew each time so that a rotated one is seen."""
        if self.token_file is None:
            return None
        words = self.token_file.read_text().split()
        if not words:
            raise SecurityError(f"--token-file: {self.token_file}: is empty")
        return words[0]

    def check_bind(self, host: str) -> None:
        """Refuse to listen wider than loopback without TLS, unless told to."""
        if self.serves_tls or self.insecure or is_loopback(host):
            return
        raise SecurityError(
            f"refusing to listen on {host} without TLS: give --tls-cert and --tls-key (`stagemesh certs init` makes "
            "them), listen on 127.0.0.1, or accept the risk with --insecure"
        )


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine only. Unix sockets do."""
    host = host.strip("[]")
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class _Token:
    role: Role
    secret: str
    expires: datetime | None


def read_tokens(path: Path) -> tuple[_Token, ...]:
    """Parse a token file. Raises SecurityError that names the line, never the token."""
    tokens = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"--tokens: {path}:{number}"
        if words[0] not in Role.__members__.values():
            raise SecurityError(f"{where}: unknown role {words[0]!r}; roles are {', '.join(Role)}")
        if len(words) not in (2, 3):
            raise SecurityError(f"{where}: want `ROLE TOKEN [EXPIRY]`, got {len(words)} words")
        if len(words[1]) < 16:
            raise SecurityError(f"{where}: the token is shorter than 16 characters")
        try:
            expires = datetime.fromisoformat(words[2]) if len(words) == 3 else None
        except ValueError:
            raise SecurityError(f"{where}: {words[2]!r} is not an RFC 3339 time") from None
        if expires is not None and expires.tzinfo is None:
            expires = expires.replace(tzinfo=UTC)
        tokens.append(_Token(Role(words[0]), words[1], expires))
    return tuple(tokens)


class TokenBook:
    """The tokens of a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._tokens = read_tokens(path)

    def _read_stamp(self) -> tuple[int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino

    def _refresh(self) -> None:
        try:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self._tokens, self._stamp = read_tokens(self._path), stamp
        except (OSError, SecurityError):
            return  # half-written or gone for a moment: the last good state goes on

    def role_of(self, secret: str) -> Role:
        """Role of a presented token. Raises MeshError(UNAUTHENTICATED)."""
        self._refresh()
        found = None
        for token in self._tokens:
            # Every token is compared, in constant time, so that timing tells nothing.
            if hmac.compare_digest(token.secret.encode(), secret.encode()):
                found = token
        if found is None:
            raise MeshError(Reason.UNAUTHENTICATED, "the token is not known here")
        if found.expires is not None and found.expires <= datetime.now(UTC):
            raise MeshError(Reason.UNAUTHENTICATED, f"the token expired at {found.expires.isoformat()}")
        return found.role
