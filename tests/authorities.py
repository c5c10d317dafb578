"""Certificates of authorities that live as long as a test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from kvloom.config.tls import TlsFiles


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
        files = TlsFiles(str(self._folder / f"{stem}.pem"), str(self._folder / f"{stem}.key"))
        certificates = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        for path, data in ((files.certificate, certificates), (files.key, made.private_key_pem.bytes())):
            written = Path(f"{path}.new")
            written.write_bytes(data)
            written.replace(path)
        return files
