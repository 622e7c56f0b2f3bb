"""A federation's own certificate authority, its server's certificate, and the nodes' keys. No openssl needed."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 3650
LOCAL = ("localhost", "127.0.0.1")  # Flower's own helpers come back over these


def make_authority(folder: Path) -> None:
    """ca.key, which stays with the server, and ca.pem, which every node gets."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fallow federation")])
    signs = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    made = _begun(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(signs, critical=True)
    made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    write_secret(folder / "ca.key", _private(key))
    _write(folder / "ca.pem", made.sign(key, hashes.SHA384()).public_bytes(form.Encoding.PEM), 0o644)


def make_server(folder: Path, hosts: Iterable[str]) -> None:
    """server.key and server.pem, for every name by which nodes reach the server."""
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    signer = form.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fallow server")])
    made = _begun(name, authority.subject, key).add_extension(x509.SubjectAlternativeName([_named(h) for h in dict.fromkeys([*LOCAL, *hosts])]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    made = made.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    write_secret(folder / "server.key", _private(key))
    _write(folder / "server.pem", made.sign(signer, hashes.SHA384()).public_bytes(form.Encoding.PEM), 0o644)


def make_node(folder: Path) -> bytes:
    """node.key in OpenSSH's form, as Flower wants it; the public line."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(folder / "node.key", key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    return key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH) + b"\n"


def write_secret(path: Path, data: bytes) -> None:
    """Readable for its owner alone, from the start."""
    _write(path, data, 0o600)


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number())
    return made.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=DAYS))


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def _write(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
