"""Who may reach the servers: which addresses they bind, the token, the TLS files."""

import hashlib
import hmac
import ipaddress
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.types import UserError

TOKEN_VARIABLE = "JAXRL_SERVE_TOKEN"
"""The environment variable a token is read from where no file is named."""

_SHORTEST_TOKEN = 16


class Token:
    """A bearer token. Only its digest is kept, so that nothing can print it."""

    def __init__(self, secret: str):
        self._digest = hashlib.sha256(secret.encode()).digest()

    def admits(self, authorization: str | None) -> bool:
        """Whether an Authorization header is "Bearer <this token>"; takes equally long for every wrong one."""
        scheme, _, given = (authorization or "").partition(" ")
        same = hmac.compare_digest(hashlib.sha256(given.strip().encode()).digest(), self._digest)
        return same and scheme.lower() == "bearer"


@dataclass(frozen=True)
class TlsFiles:
    """Paths of a PEM certificate chain and its private key."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Access:
    """A checked answer to who may reach the servers; made by `check_access`."""

    host: str
    token: Token | None
    tls: TlsFiles | None


def read_token(file: Path | None, environment: Mapping[str, str] = os.environ) -> Token | None:
    """The token in `file` or else in JAXRL_SERVE_TOKEN; None if there is neither. Raises as `read_secret`."""
    secret = read_secret(file, environment)
    return None if secret is None else Token(secret)


def read_secret(file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The same token as it is sent.

    Raises UserError if it cannot be read, is shorter than 16 characters, or could not be sent in a header.
    """
    if file is not None:
        source = f"token file {file}"
        try:
            secret = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source} cannot be read ({error})") from None
    elif TOKEN_VARIABLE in environment:
        source, secret = TOKEN_VARIABLE, environment[TOKEN_VARIABLE].strip()
    else:
        return None
    if len(secret) < _SHORTEST_TOKEN or not all("!" <= char <= "~" for char in secret):
        raise UserError(
            f"{source} must hold one token of at least {_SHORTEST_TOKEN} printable ASCII characters without spaces; "
            f"`openssl rand -hex 32` makes one"
        )
    return secret


def check_access(host: str, token: Token | None, certificate: Path | None, key: Path | None) -> Access:
    """Loopback may be open; any other address needs a token and TLS.

    Raises UserError if either is missing, if only one of the TLS files is named, or if they are not a certificate
    and its key.
    """
    if (certificate is None) != (key is None):
        raise UserError("--tls-cert and --tls-key go together; give both, or neither")
    if not is_loopback(host) and (token is None or certificate is None):
        missing = [] if token else [f"a token (--token-file FILE, or {TOKEN_VARIABLE})"]
        missing += [] if certificate else ["TLS (--tls-cert FILE --tls-key FILE)"]
        raise UserError(
            f"refusing to listen on {host} without {' and without '.join(missing)}: whoever reaches it could sample "
            f"and replace the weights; add it, or keep --host 127.0.0.1"
        )
    tls = TlsFiles(certificate, key) if certificate and key else None
    if tls is not None:
        server_context(tls)
    # A name may resolve to anything; what was checked is what is bound.
    return Access("127.0.0.1" if host == "localhost" else host.strip("[]"), token, tls)


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine alone. A host name other than localhost never counts."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def server_context(tls: TlsFiles) -> ssl.SSLContext:
    """Raises UserError if the files are not a certificate and its private key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:
        raise UserError(
            f"--tls-cert {tls.certificate} and --tls-key {tls.key} are not a PEM certificate and its key ({error})"
        ) from None
    return context
