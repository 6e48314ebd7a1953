"""An HTTPS endpoint with its own certificate authority, and a proxy in front of it."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """A certificate authority: ``bundle`` is the file to trust, ``server`` a TLS context with its certificate."""

    bundle: Path
    server: ssl.SSLContext


_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


def _signed(subject: str, key: ec.EllipticCurvePrivateKey, issuer: str) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    name, by = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (subject, issuer))
    built = x509.CertificateBuilder().subject_name(name).issuer_name(by).public_key(key.public_key())
    return built.serial_number(x509.random_serial_number()).not_valid_before(now - DAY).not_valid_after(now + DAY)


def make_authority(folder: Path, *hosts: str) -> Authority:
    """Create an authority in ``folder`` and a certificate for ``hosts`` and 127.0.0.1."""
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = _signed("ca", ca_key, "ca").add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca = ca.add_extension(_SIGNS_CERTIFICATES, critical=True)
    ca = ca.add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
    names = [*map(x509.DNSName, hosts), x509.IPAddress(ip_address("127.0.0.1"))]
    leaf = _signed("server", key, "ca").add_extension(x509.SubjectAlternativeName(names), critical=False)
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    leaf = leaf.add_extension(above, critical=False)
    bundle, chain = folder / "ca.pem", folder / "server.pem"
    bundle.write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    chain.write_bytes(leaf.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM) + private)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(chain)
    return Authority(bundle, server)


@dataclass
class Origin:
    """What an endpoint received: server names of TLS handshakes, and each request with its body."""

    port: int = 0
    names: list[str | None] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@asynccontextmanager
async def https_origin(context: ssl.SSLContext) -> AsyncIterator[Origin]:
    """Serve over TLS: reads return the requested range of ``0123456789``, listings are empty, writes succeed."""
    origin = Origin()
    context.sni_callback = lambda _socket, name, _context: origin.names.append(name)

    async def answer(request: web.Request) -> web.Response:
        origin.requests.append((request.method, f"{request.host}{request.path}"))
        origin.headers.append({name.lower(): value for name, value in request.headers.items()})
        origin.bodies.append(await request.read())
        if "list-type" in request.query:
            return web.Response(body=b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        if (span := request.http_range) and request.method == "GET" and span.start is not None:
            part = b"0123456789"[span]
            headers = {"ETag": '"e"', "Content-Range": f"bytes {span.start}-{span.start + len(part) - 1}/10"}
            return web.Response(status=206, body=part, headers=headers)
        return web.Response(headers={"ETag": '"e"'})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        origin.port = runner.addresses[0][1]
        yield origin
    finally:
        await runner.cleanup()


@dataclass
class Proxy:
    """An HTTP proxy that connects every tunnel to one port of this machine."""

    url: str
    tunnels: list[str] = field(default_factory=list)


@asynccontextmanager
async def connect_proxy(port: int, *, password: str) -> AsyncIterator[Proxy]:
    """Serve ``CONNECT`` for the user ``user`` with ``password``; all tunnels end at 127.0.0.1:``port``."""
    given = b"Proxy-Authorization: Basic " + base64.b64encode(f"user:{password}".encode())
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]  # this is one
        head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.decode().partition(" ")
        if method != "CONNECT" or given not in head:
            writer.write(b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            return
        proxy.tunnels.append(rest.partition(" ")[0])
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Yes\r\n\r\n")
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = Proxy(f"http://user:{password}@127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield proxy
    finally:
        server.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
