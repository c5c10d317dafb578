"""A fleet behind TLS, whose administration wants certificates. Real processes and models."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import openai
import pytest

from kvloom.config.config import DEMO
from tests.authorities import Authority
from tests.commands import kvloom
from tests.processes import DEADLINE, fleet

CONFIG = f"""
kv_memory: 16MiB
block_bytes: 4KiB
models: {{sums: {DEMO}/sums}}
tls: {{certificate: cert.pem, key: cert.key, client_ca: authority.pem}}
"""


def asked(url: str, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the official client is answered, which trusts the authority."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=DEADLINE) as client:
        said = {"role": "user", "content": "What is 17 + 25?"}
        answer = client.chat.completions.create(model="sums", messages=[said], temperature=0)  # type: ignore[list-item]
        return str(answer.choices[0].message.content)


def test_a_fleet_behind_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    files, own = authority.sign("cert", "localhost"), authority.sign("ops", "ops.example.org", user="ops")
    config = tmp_path / "fleet.yaml"
    config.write_text(CONFIG)
    with fleet(str(config)) as served:
        url = served.wait_until_ready()
        assert url.startswith("https://localhost:")
        assert f"curl {url}/v1/chat/completions" in served.wait_for("Try:")
        before = asked(url, authority, monkeypatch)
        assert "42" in before

        monkeypatch.delenv("SSL_CERT_FILE")
        ask = ["unit", "list", "--url", url]
        shows = ["--certificate", own.certificate, "--key", own.key]
        assert "unit-0" in kvloom(*ask, "--ca", str(authority.file), *shows).stdout
        refused = kvloom(*ask, "--ca", str(authority.file))
        assert refused.returncode == 1
        assert "needs a client certificate" in refused.stderr
        unknown = kvloom(*ask, *shows)
        assert unknown.returncode == 1
        assert "certificate verify failed" in unknown.stderr
        assert "--ca FILE names the certificates" in unknown.stderr
        plain = kvloom("unit", "list", "--url", url.replace("https:", "http:"))
        assert plain.returncode == 1
        assert "if it speaks TLS, --url https://HOST:PORT is right" in plain.stderr

        Path(files.certificate).write_text("nothing")
        os.kill(served.children()["gateway"], signal.SIGKILL)
        assert "holds none" in served.wait_for("what was read before stays")
        assert asked(url, authority, monkeypatch) == before
        assert served.end(signal.SIGTERM) == 0


def test_a_fleet_whose_certificate_cannot_be_used(tmp_path: Path) -> None:
    Authority(tmp_path).sign("cert", days=-1)
    config = tmp_path / "fleet.yaml"
    config.write_text(CONFIG)
    ended = kvloom("serve", str(config))
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert f"tls: certificate: {tmp_path}/cert.pem has expired; a valid one is right" in ended.stderr
