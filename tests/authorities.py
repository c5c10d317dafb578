"""Certificates of authorities that live as long as a test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID

from kvloom.config.tls import TlsFiles
from kvloom.types.files import replacing


class Authority:
    """Signs certificates, and writes them with their keys into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def sign(self, stem: str, *names: str, days: int = 1, user: str | None = None) -> TlsFiles:
        """Writes STEM.pem and STEM.key; what was there is replaced. days: until it expires, which may be
        in the past; user: the common name."""
        now = datetime.now(UTC)
        made = self._ca.issue_cert(
            *names or ("localhost", "127.0.0.1"),
            common_name=user,
            not_before=now - timedelta(days=30),
            not_after=now + timedelta(days=days),
        )
        certificates = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        return self._write(stem, certificates, made.private_key_pem.bytes())

    def sign_garbage(self, stem: str) -> TlsFiles:
        """Writes a certificate, with its key, in which the name is no text."""
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        issuer = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        signing = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(signing, ec.EllipticCurvePrivateKey)
        name = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"\x30\x04\x82\x02\xff\xfe")
        made = x509.CertificateBuilder(
            issuer.subject,
            x509.Name([]),
            key.public_key(),
            7,
            now - timedelta(days=1),
            now + timedelta(days=1),
        ).add_extension(name, critical=False)
        pem = serialization.Encoding.PEM
        return self._write(
            stem,
            made.sign(signing, hashes.SHA256()).public_bytes(pem),
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        )

    def _write(self, stem: str, certificates: bytes, key: bytes) -> TlsFiles:
        files = TlsFiles(str(self._folder / f"{stem}.pem"), str(self._folder / f"{stem}.key"))
        for path, data in ((files.certificate, certificates), (files.key, key)):
            with replacing(Path(path)) as made:
                made.write(data)
        return files
