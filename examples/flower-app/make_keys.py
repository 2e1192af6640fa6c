"""Make the keys of a trial: an authority, the SuperLink's certificate, and a key pair for each node.

    python make_keys.py keys --host 127.0.0.1 --nodes 3

The folder then holds `ca.crt`, which every node and every `flwr` user needs; `server.crt` and `server.key` for the
SuperLink; and `node0`, `node0.pub` and so on, whose private halves belong on the nodes and nowhere else. The key of the
authority is not kept, so nobody can sign a second certificate with it. For a trial only: real deployments get their
certificates from their own authority, and each node makes its own key pair and hands out the public half.
"""

import argparse
import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the keys of a trial.")
    parser.add_argument("folder", type=Path, help="where to put them; must not hold keys already")
    parser.add_argument("--host", action="append", default=[], help="a name or address of the SuperLink, repeatable")
    parser.add_argument("--nodes", type=int, default=3, help="how many nodes (3)")
    parser.add_argument("--days", type=int, default=30, help="how long the certificates are good for (30)")
    given = parser.parse_args()
    try:
        given.folder.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        parser.error(f"{given.folder} is there already; name a new folder, so that no key is written over")
    # The SuperLink's own processes speak to it through the loopback address, so that one is always in.
    make_certificates(given.folder, [*dict.fromkeys(["127.0.0.1", "localhost", *given.host])], given.days)
    for number in range(given.nodes):
        make_node(given.folder / f"node{number}")
    print(f"{given.folder}: ca.crt, server.crt, server.key, and {given.nodes} node keys")


def make_certificates(folder: Path, hosts: list[str], days: int) -> None:
    """Write an authority's certificate and a server's certificate with its key, good for the hosts."""
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of a trial")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    signing = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    serving = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    names = x509.SubjectAlternativeName([_name(host) for host in hosts])
    root = (
        _builder(issuer, issuer, authority.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signing, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    leaf = (
        _builder(subject, issuer, server.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(serving, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .add_extension(names, critical=False)
        .sign(authority, hashes.SHA384())
    )
    (folder / "ca.crt").write_bytes(root.public_bytes(Encoding.PEM))
    (folder / "server.crt").write_bytes(leaf.public_bytes(Encoding.PEM))
    _write_private(folder / "server.key", server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def make_node(path: Path) -> None:
    """Write a node's key pair as ssh-keygen would: the private half to `path`, the public half beside it."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # the nodes' clocks may be a little behind
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_private(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


if __name__ == "__main__":
    main()
