"""The processes of a fleet trust one certificate, which was made or given."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvloom.config.tls import TlsFiles, shake_hands
from kvloom.serve.processes.identity import FleetIdentity, calling_context, serving_context
from kvloom.types.errors import ConfigError
from tests.authorities import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def kept(identity: FleetIdentity, folder: Path) -> TlsFiles:
    folder.mkdir()
    return identity.keep(folder)


def takes(server: TlsFiles, caller: TlsFiles) -> bool:
    """Returns whether a server takes a caller that would trust anybody."""
    trusting = calling_context(caller)
    trusting.verify_mode = ssl.CERT_NONE
    return agree(trusting, serving_context(server))


def calls(caller: TlsFiles, server: TlsFiles) -> bool:
    """Returns whether a caller goes on with a server that would take anybody."""
    trusting = serving_context(server)
    trusting.verify_mode = ssl.CERT_NONE
    return agree(calling_context(caller), trusting)


def agree(client: ssl.SSLContext, server: ssl.SSLContext) -> bool:
    try:
        shake_hands(client, server)
    except ssl.SSLError:
        return False
    return True


def for_servers(folder: Path) -> TlsFiles:
    """Returns a certificate that no caller may show."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(usage, critical=True)
    files = TlsFiles(str(folder / "server.pem"), str(folder / "server.key"))
    Path(files.certificate).write_bytes(made.sign(key, SHA256()).public_bytes(Encoding.PEM))
    Path(files.key).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


def test_each_fleet_makes_another_one(tmp_path: Path) -> None:
    one, other = (kept(FleetIdentity.make(), tmp_path / name) for name in ("one", "other"))
    assert takes(one, one)
    assert calls(one, one)
    assert not takes(one, other)
    assert not calls(one, other)


def test_one_that_is_given_is_trusted_and_not_its_authority(tmp_path: Path, authority: Authority) -> None:
    given = kept(FleetIdentity.read(authority.sign("fleet", "any.example.org")), tmp_path / "given")
    of_the_same_authority = authority.sign("other", "any.example.org")
    assert takes(given, given)
    assert calls(given, given)
    assert not takes(given, of_the_same_authority)
    assert not calls(given, of_the_same_authority)


def test_what_stands_beside_it_in_its_file_does_not_matter(tmp_path: Path, authority: Authority) -> None:
    given, old = authority.sign("fleet"), authority.sign("old", days=-1)
    file = Path(given.certificate)
    file.write_bytes("subject=Müller\n".encode() + file.read_bytes() + Path(old.certificate).read_bytes())
    identity = FleetIdentity.read(given)
    assert identity.certificate.count(b"BEGIN") == 1
    assert takes(kept(identity, tmp_path / "given"), given)


def test_one_that_cannot_be_read_is_refused(tmp_path: Path, authority: Authority) -> None:
    given = authority.sign("fleet")
    with pytest.raises(
        ConfigError, match=r"node_tls: key: .* a PEM file with the certificate's key is right"
    ):
        FleetIdentity.read(TlsFiles(given.certificate, str(tmp_path / "none.key")))
    old = authority.sign("old", days=-1)
    with pytest.raises(ConfigError, match=r"node_tls: certificate: .* has expired; a valid one is right"):
        FleetIdentity.read(old)


def test_one_that_no_caller_may_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node_tls: .*server\.pem cannot be used: .*for clients is right"):
        FleetIdentity.read(for_servers(tmp_path))
