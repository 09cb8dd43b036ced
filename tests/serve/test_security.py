"""Who may call: TLS, client certificates, tokens, and addresses that are not this machine's."""

import datetime
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from qwen4jax.serve.client import Client, ServerError
from qwen4jax.serve.options import EMBEDDED, OptionsError, parse
from qwen4jax.serve.security import tokens_of
from tests.serve.running import RunningServer

Start = Callable[..., RunningServer]


class Authority:
    """Makes certificates, in files of a folder."""

    def __init__(self, folder: Path, name: str):
        self.folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self._certificate = self._signed(self._name, self._key, is_authority=True)
        self.file = self._written(f"{name}.pem", self._certificate)

    def issue(self, name: str) -> tuple[Path, Path]:
        """Files of a certificate for this machine, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        key_file = self.folder / f"{name}.key"
        key_file.write_bytes(private)
        certificate = self._signed(_named(name), key, is_authority=False)
        return self._written(f"{name}.pem", certificate), key_file

    def _signed(self, name: x509.Name, key: Any, *, is_authority: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        here = [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(x509.SubjectAlternativeName(here), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _written(self, name: str, certificate: x509.Certificate) -> Path:
        file = self.folder / name
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return file


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def test_certificates_and_tokens(start: Start, tmp_path: Path):
    """One server that asks for both; whoever lacks one is turned away, health asks for no token."""
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    cert, key = ours.issue("server")
    own = dict(zip(("tls_cert", "tls_key"), ours.issue("client"), strict=True))
    foreign = dict(zip(("tls_cert", "tls_key"), other.issue("stranger"), strict=True))
    tokens = tmp_path / "tokens"
    tokens.write_text("first-token\n\nsecond-token\n")
    files = f"--tls-cert {cert} --tls-key {key} --tls-client-ca {ours.file} --token-file {tokens}"
    with start(*files.split()) as server:
        target = f"localhost:{server.port}"

        def code_of(**arguments: Any) -> str:
            try:
                with Client(target, **arguments) as client:
                    return "OK" if client.status(timeout=60).slots else ""
            except ServerError as error:
                return error.code

        assert code_of(tls_ca=ours.file, **own, token="first-token") == "OK"
        assert code_of(tls_ca=ours.file, **own, token="second-token") == "OK"
        assert code_of(tls_ca=ours.file, **own) == "UNAUTHENTICATED"
        assert code_of(tls_ca=ours.file, **own, token="first-toke") == "UNAUTHENTICATED"
        # no certificate, a stranger's, and a server that a client does not trust
        assert code_of(tls_ca=ours.file, token="first-token") == "UNAVAILABLE"
        assert code_of(tls_ca=ours.file, **foreign, token="first-token") == "UNAVAILABLE"
        assert code_of(tls_ca=other.file, **own, token="first-token") == "UNAVAILABLE"
        assert code_of(token="first-token") == "UNAVAILABLE"
        secrets = grpc.ssl_channel_credentials(
            ours.file.read_bytes(), own["tls_key"].read_bytes(), own["tls_cert"].read_bytes()
        )
        with grpc.secure_channel(target, secrets) as channel:
            health = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert health(b"", timeout=60)
            generate = channel.unary_stream("/qwen4jax.v1.Generation/Generate")
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                list(generate(b"", timeout=60))
        server.signal()
        assert server.exit_code() == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--host 0.0.0.0", "--host: 0.0.0.0 is reachable from elsewhere"),
        ("--host ::", "--host: :: is reachable from elsewhere"),
        ("--host example.org", "--host: example.org is reachable from elsewhere"),
        ("--tls-cert {here}", "--tls-cert and --tls-key: one is given without the other"),
        ("--tls-client-ca {here}", "--tls-client-ca: needs --tls-cert and --tls-key"),
        ("--tls-cert /absent --tls-key {here}", "--tls-cert: /absent is no file"),
        ("--token-file /absent", "--token-file: /absent is no file"),
        ("--max-slots 0", "--max-slots: 0 is not in 1..1024"),
        ("--draft 8", "--draft: 8 is not in 0..7"),
        ("--draft-vocab 0", "--draft-vocab: 0 is not in 1.."),
        ("--port 65536", "--port: 65536 is not in 0..65535"),
        ("--model /absent", "--model: /absent is no directory"),
    ],
)
def test_options_that_cannot_be_followed(tmp_path: Path, flags: str, message: str):
    model = [] if "--model" in flags else ["--model", str(tmp_path)]
    with pytest.raises(OptionsError, match=message):
        parse([*model, *flags.format(here=__file__).split()])


def test_what_is_allowed_by_name(tmp_path: Path):
    """Other addresses without TLS, loopback by any of its names."""
    for host in ("127.0.0.1", "127.3.4.5", "::1", "localhost"):
        assert parse(["--model", str(tmp_path), "--host", host]).host == host
    assert parse(["--model", str(tmp_path), "--host", "0.0.0.0", "--allow-insecure"]).host


def test_the_embedded_checkpoint_is_the_default():
    if EMBEDDED.is_dir():
        assert parse([]).model == EMBEDDED
    else:
        with pytest.raises(OptionsError, match="there is no embedded checkpoint at"):
            parse([])


def test_token_files(tmp_path: Path):
    file = tmp_path / "tokens"
    file.write_text("a\n  b  \n\n")
    assert tokens_of(file) == (b"a", b"b")
    file.write_text("\n")
    with pytest.raises(OptionsError, match="--token-file: there is no token in"):
        tokens_of(file)
    assert tokens_of(None) == ()
