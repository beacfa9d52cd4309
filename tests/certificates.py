"""Certificates for tests: an authority, and what it signs, as files in PEM."""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from delayd.address import Tls

DAY = timedelta(days=1)


class Files(NamedTuple):
    """A certificate and its key."""

    cert: str
    key: str


class Authority:
    """Signs certificates; its own is the file ``ca``."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = _builder(self._name, self._name, self._key, datetime.now(UTC) + DAY)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.ca = str(folder / f"{name}.pem")
        Path(self.ca).write_bytes(_pem(own.sign(self._key, hashes.SHA256())))

    def sign(self, file: str, *names: str, ends: timedelta = DAY) -> Files:
        """A certificate for names and addresses, valid from two days ago until so long from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file)])
        made = _builder(subject, self._name, key, datetime.now(UTC) + ends)
        made = made.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
        files = Files(str(self._folder / f"{file}.pem"), str(self._folder / f"{file}.key"))
        put(files.cert, _pem(made.sign(self._key, hashes.SHA256())))
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        put(files.key, key.private_bytes(*form))
        return files

    def server(self, file: str = "server", *names: str, ends: timedelta = DAY) -> Tls:
        """What a server of this machine has, which also dials others."""
        files = self.sign(file, *(names or ("localhost", "127.0.0.1")), ends=ends)
        return Tls(self.ca, files.cert, files.key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, ends: datetime
) -> x509.CertificateBuilder:
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number())
    return made.not_valid_before(datetime.now(UTC) - 2 * DAY).not_valid_after(ends)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def put(path: str, content: bytes) -> None:
    """Put a file in place of another one in one step, as those who renew certificates do."""
    with open(os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    os.rename(f"{path}.new", path)
