"""The certificate by which the processes of a fleet on several hosts know each other.

There is one for a fleet, made when the fleet starts or given, and each process of the fleet has it with its
key. A process that shows it belongs to the fleet; one that does not is cut off during the handshake, on
either side.
"""

from __future__ import annotations

import os
import re
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from msgspec import Struct

from kvloom.config.tls import TlsFiles, server_context, shake_hands
from kvloom.types.errors import ConfigError

_NAME: Final = "kvloom-fleet"  # in a certificate that is made; nobody compares it with a host's
_LATE: Final = timedelta(days=1)  # by which hosts' clocks may differ
_LIFE: Final = timedelta(days=3650)
_FIRST: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)


class FleetIdentity(Struct, frozen=True):
    """A fleet's certificate and its key, each as PEM."""

    certificate: bytes
    key: bytes

    @staticmethod
    def read(files: TlsFiles) -> FleetIdentity:
        """Returns the certificate that a fleet is given: the first one of the file, with its key. Raises
        ConfigError if the fleet's processes would refuse it."""
        try:
            server_context(files)
            first = _FIRST.search(Path(files.certificate).read_bytes())
            identity = FleetIdentity(first[0] if first else b"", Path(files.key).read_bytes())
            with TemporaryDirectory() as folder:
                kept = identity.keep(Path(folder))
                shake_hands(calling_context(kept), serving_context(kept))
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", None) or error.reason or error
            raise ConfigError(
                f"node_tls: {files.certificate} cannot be used: {why}; a certificate that is valid for "
                "servers and for clients is right"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"node_tls: {error}") from error
        return identity

    @staticmethod
    def make() -> FleetIdentity:
        """Returns a new certificate, which no other fleet has."""
        # Fleets of one host do without this library.
        from cryptography import x509  # noqa: PLC0415
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.x509.oid import NameOID  # noqa: PLC0415

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _LATE)
            .not_valid_after(now + _LIFE)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        return FleetIdentity(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )

    def keep(self, folder: Path) -> TlsFiles:
        """Writes it into a folder that nobody else can enter, and returns the files."""
        files = TlsFiles(str(folder / "fleet.crt"), str(folder / "fleet.key"))
        for path, content in ((files.certificate, self.certificate), (files.key, self.key)):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(file, "wb") as made:
                made.write(content)
        return files


def serving_context(files: TlsFiles) -> ssl.SSLContext:
    """Returns the context in which a process of the fleet takes connections of others of the fleet."""
    return _context(ssl.PROTOCOL_TLS_SERVER, files)


def calling_context(files: TlsFiles) -> ssl.SSLContext:
    """Returns the context in which a process of the fleet calls another one, at any address."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    context.check_hostname = False  # It trusts this one certificate, whatever its names are.
    return context


def _context(side: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.certificate, files.key)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # It is trusted, and not who has signed it.
    context.load_verify_locations(files.certificate)
    return context
