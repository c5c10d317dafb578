"""The certificates with which gateways speak TLS to clients, and a fleet's processes to each other: the
config's sections, what is wrong with them, and a gateway's context."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, Self

from msgspec import Struct
from pydantic import AfterValidator, PrivateAttr, ValidationInfo, model_validator

from kvloom.config.fields import ConfigSection, Surroundings, told_unread

_TURNS: Final = 4  # A handshake takes two on each side.
_WHY: Final = {9: "is not valid yet", 10: "has expired"}  # by OpenSSL's X509_V_ERR_…


class TlsFiles(Struct, frozen=True):
    """The paths of the certificate, with those between it and its authority behind it, of its key, and of the
    authorities that sign callers' certificates, if any do. All are PEM."""

    certificate: str
    key: str
    client_ca: str | None = None


def _absolute(value: Path, info: ValidationInfo) -> Path:
    return Surroundings.of(info).folder / value.expanduser()


TlsPath = Annotated[Path, AfterValidator(_absolute)]


class NodeTlsConfig(ConfigSection):
    """The section `node_tls`, whose paths are absolute. Its files are read when a fleet begins, and never
    again."""

    certificate: TlsPath
    key: TlsPath

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(str(self.certificate), str(self.key))


class TlsConfig(NodeTlsConfig):
    """The section `tls`, whose files can be used."""

    client_ca: TlsPath | None = None

    _names: tuple[str, ...] = PrivateAttr(default=())
    _own_authority: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _read(self) -> Self:
        shown = _try_out(server_context(self.files), self.files.certificate)
        names = shown.get("subjectAltName", ())
        self._names = tuple(str(name) for kind, name in names if kind in ("DNS", "IP Address"))
        self._own_authority = shown.get("issuer") == shown.get("subject")
        return self

    @property
    def files(self) -> TlsFiles:
        client_ca = None if self.client_ca is None else str(self.client_ca)
        return TlsFiles(str(self.certificate), str(self.key), client_ca)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names and addresses for which the certificate is, as it was at the start."""
        return self._names

    @property
    def own_authority(self) -> bool:
        """Returns whether the certificate has signed itself, so that callers must be told to trust it."""
        return self._own_authority


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Returns a context for new connections, once a handshake with it has gone well in memory. Raises
    ValueError with one line, which names the file at fault."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _holds("certificate", files.certificate, "CERTIFICATE-----", "a PEM file with the certificate")
    _holds("key", files.key, "PRIVATE KEY-----", "a PEM file with the certificate's key")
    try:
        context.load_cert_chain(files.certificate, files.key, lambda: _locked(files.key))
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(
                f"key: {files.key} does not fit {files.certificate}; the key for which that was made is right"
            ) from error
        raise ValueError(
            f"{files.certificate} and {files.key} cannot be used: {_reason(error)}; "
            "a certificate and its key in PEM are right"
        ) from error
    if files.client_ca is not None:
        _holds("client_ca", files.client_ca, "CERTIFICATE-----", "a PEM file with authorities' certificates")
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            raise ValueError(
                f"client_ca: {files.client_ca}: {_reason(error)}; certificates in PEM are right"
            ) from error
        context.verify_mode = ssl.CERT_OPTIONAL
    _try_out(context, files.certificate)
    return context


def _holds(key: str, path: str, mark: str, right: str) -> None:
    try:
        text = Path(path).read_text("latin-1")
    except OSError as error:
        raise ValueError(f"{key}: {told_unread(path, error, right)}") from error
    if mark not in text:
        raise ValueError(f"{key}: {path} holds none; {right} is right")


def _locked(path: str) -> NoReturn:
    raise ValueError(f"key: {path} needs a password; a key without one, which only its owner reads, is right")


def _reason(error: OSError) -> str:
    why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (why or str(error)).replace("_", " ").lower()


def _try_out(context: ssl.SSLContext, certificate: str) -> dict[str, Any]:
    """Lets a client that trusts this certificate alone shake hands with the context, and returns what the
    certificate says. Raises ValueError if the client refuses it, as it does one that has expired."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(certificate)
        return shake_hands(client, context)
    except ssl.SSLCertVerificationError as error:
        why = _WHY.get(error.verify_code, f"cannot be used: {error.verify_message}")
        raise ValueError(f"certificate: {certificate} {why}; a valid one is right") from error
    except OSError as error:
        raise ValueError(
            f"certificate: {certificate} cannot be used: {_reason(error)}; another one is right"
        ) from error


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, Any]:
    """Lets both shake hands in memory, and returns what the server's certificate says. Raises ssl.SSLError if
    one refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_TURNS):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return dict(sides[0].getpeercert() or {})
