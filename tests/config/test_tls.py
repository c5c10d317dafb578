"""The config's keys for TLS, proxies, origins and the time of a request."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from ssl import TLSVersion, VerifyMode
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from kvloom.config.config import Config
from kvloom.config.tls import server_context
from tests.authorities import Authority
from tests.config.configs import load, refused

MODELS: dict[str, Any] = {"models": {"a": "./model"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a certificate, others that cannot be used, and a model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    authority = Authority(tmp_path)
    authority.sign("cert", "kvloom.example.org", "127.0.0.1")
    authority.sign("other")
    authority.sign("old", days=-1)
    (tmp_path / "empty.pem").write_text("")
    (tmp_path / "broken.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    key = load_pem_private_key((tmp_path / "cert.key").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (tmp_path / "locked.key").write_bytes(locked)
    return tmp_path


def read(folder: Path, **settings: object) -> Config:
    return load(folder, yaml.safe_dump(MODELS | settings))


def why(folder: Path, **settings: object) -> str:
    return refused(folder, yaml.safe_dump(MODELS | settings)).removeprefix(f"{folder}/fleet.yaml: ")


def test_a_certificate(folder: Path) -> None:
    tls = read(folder, tls={"certificate": "cert.pem", "key": "cert.key", "client_ca": "authority.pem"}).tls
    assert tls is not None
    assert tls.files.certificate == str(folder / "cert.pem")
    assert tls.files.client_ca == str(folder / "authority.pem")
    assert tls.names == ("kvloom.example.org", "127.0.0.1")
    assert not tls.own_authority
    assert server_context(tls.files).minimum_version is TLSVersion.TLSv1_2
    assert server_context(tls.files).verify_mode is VerifyMode.CERT_OPTIONAL


def test_a_certificate_that_has_signed_itself(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "me")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    (folder / "self.pem").write_bytes(made.sign(key, SHA256()).public_bytes(Encoding.PEM))
    (folder / "self.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    tls = read(folder, tls={"certificate": "self.pem", "key": "self.key"}).tls
    assert tls is not None
    assert tls.own_authority
    assert tls.names == ()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["none.pem", "cert.key"], "certificate: F/none.pem: No such file or directory; a PEM file with"),
        (["cert.pem", "none.key"], "key: F/none.key: No such file or directory; a PEM file with"),
        ([".", "cert.key"], "certificate: F: Is a directory; a PEM file with"),
        (["empty.pem", "cert.key"], "certificate: F/empty.pem holds none; a PEM file with"),
        (["cert.key", "cert.pem"], "certificate: F/cert.key holds none; a PEM file with"),
        (["broken.pem", "cert.key"], "F/broken.pem and F/cert.key cannot be used: "),
        (["cert.pem", "other.key"], "key: F/other.key does not fit F/cert.pem; the key for which"),
        (["cert.pem", "locked.key"], "key: F/locked.key needs a password; a key without one"),
        (["old.pem", "old.key"], "certificate: F/old.pem has expired; a valid one is right"),
        (["cert.pem", "cert.key", "none.pem"], "client_ca: F/none.pem: No such file or directory; a PEM"),
        (["cert.pem", "cert.key", "empty.pem"], "client_ca: F/empty.pem holds none; a PEM file with"),
        (["cert.pem", "cert.key", "broken.pem"], "client_ca: F/broken.pem: "),
    ],
)
def test_certificates_that_cannot_be_used(folder: Path, files: list[str], said: str) -> None:
    section = dict(zip(("certificate", "key", "client_ca"), files, strict=False))
    assert why(folder, tls=section).startswith(
        "tls: " + said.replace("F/", f"{folder}/").replace("F:", f"{folder}:")
    )


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("cert.pem", "tls: 'cert.pem'; a mapping with `certificate` and `key` is right"),
        ({"certificate": "cert.pem"}, "tls.key: is missing"),
        ({"certificat": "cert.pem"}, "tls.certificat: unknown key; did you mean `certificate`?"),
    ],
)
def test_sections_that_are_none(folder: Path, section: object, said: str) -> None:
    assert why(folder, tls=section).startswith(said)


@pytest.mark.parametrize(
    ("key", "given", "read_as"),
    [
        ("proxies", ["10.0.0.1", "10.0.0.0/8", "fd00::/8"], ("10.0.0.1/32", "10.0.0.0/8", "fd00::/8")),
        ("proxies", "127.0.0.1", ("127.0.0.1/32",)),
        ("proxies", [], ()),
        ("allow_origins", ["HTTPS://Chat.Example.org:443/", "http://x:8080"], ("https://chat.example.org", "http://x:8080")),
        ("allow_origins", ["http://[::1]:3000", "chrome-extension://abc"], ("http://[::1]:3000", "chrome-extension://abc")),
        ("allow_origins", "*", ("*",)),
        ("request_timeout", "10min", 600.0),
        ("request_timeout", "none", None),
        ("request_timeout", None, None),
    ],
)  # fmt: skip
def test_as_they_are_compared(folder: Path, key: str, given: object, read_as: object) -> None:
    assert getattr(read(folder, **{key: given}), key) == read_as


@pytest.mark.parametrize(
    ("key", "given", "said"),
    [
        ("proxies", ["10.0.0.1/8"], "'10.0.0.1/8' is no network; 10.0.0.0/8 is right"),
        (
            "proxies",
            ["proxy.local"],
            "'proxy.local' is no network; an address or a network, as `10.0.0.0/8`,",
        ),
        ("proxies", [1], "[1]; a list of addresses and networks"),
        ("proxies", None, "nothing; a list of addresses and networks"),
        ("allow_origins", ["chat.example.org"], "'chat.example.org' is no origin; `https://HOST`"),
        ("allow_origins", ["https://chat.example.org/page"], "'https://chat.example.org/page' is no origin"),
        ("allow_origins", ["https://*.example.org"], "'https://*.example.org' is no origin"),
        ("allow_origins", ["null"], "'null' is no origin"),
        ("allow_origins", {"a": 1}, "{'a': 1}; a list of origins"),
        ("request_timeout", 0, "0 s; 1 s to 24 h, or `none`, is right"),
        ("request_timeout", "2d", "'2d' is no time"),
        ("request_timeout", True, "'True' is no time"),
    ],
)
def test_wrong_ones(folder: Path, key: str, given: object, said: str) -> None:
    assert why(folder, **{key: given}).startswith(f"{key}: {said}")
