"""One process that serves one project, and the refusal to do so where passwords would travel in the open."""

from __future__ import annotations

import ipaddress
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn

from heedful.annotate.project import open_project
from heedful.annotate.web.app import create_app
from heedful.annotate.web.door import Limits
from heedful.errors import ConfigError


def serve(
    folder: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8700,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    behind_proxy: str | None = None,
    i_know_it_is_not_encrypted: bool = False,
    limits: Limits | None = None,
    ready: Callable[[str], None] = print,
) -> None:
    """Serve the project until SIGINT or SIGTERM; requests that have begun are answered first.

    Args:
        port: 0 = any free one.
        tls_cert, tls_key: PEM files.
        behind_proxy: address of a proxy that ends TLS: its X-Forwarded-For and -Proto are believed, nobody else's.
        i_know_it_is_not_encrypted: listen beyond this machine without TLS.
        ready: called with the address once the port is open.

    Raises:
        ConfigError: it would listen beyond this machine without TLS, a certificate cannot be read, the proxy has no IP
            address, or the port is taken.
    """
    check_address(host, tls=tls_cert is not None, accepted=i_know_it_is_not_encrypted)
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls_cert and --tls_key: give both, the certificate and its key")
    if tls_cert is not None and tls_key is not None:
        _check_certificate(tls_cert, tls_key)
    if behind_proxy is not None:
        _check_proxy(behind_proxy)
    project = open_project(folder)
    app = create_app(project, secure_cookies=tls_cert is not None or behind_proxy is not None, limits=limits)
    listening = _listen(host, port)
    scheme = "https" if tls_cert is not None else "http"
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        app, ssl_certfile=tls_cert, ssl_keyfile=tls_key, proxy_headers=behind_proxy is not None,
        forwarded_allow_ips=behind_proxy or "", server_header=False, access_log=False, log_config=None, ws="none",
        lifespan="off", timeout_graceful_shutdown=15,
    )  # fmt: skip
    ready(f"{scheme}://{shown}:{listening.getsockname()[1]}")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises what ended it once more
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
        project.database.dispose()


def check_address(host: str, *, tls: bool, accepted: bool) -> None:
    """Raises ConfigError where passwords and rankings would travel readable beyond this machine."""
    if not (tls or accepted or is_loopback(host)):
        raise ConfigError(
            f"--host {host}: passwords and texts would travel readable by others; give --tls_cert and --tls_key, or "
            "listen on 127.0.0.1 behind a proxy that ends TLS, or say --i_know_it_is_not_encrypted"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_proxy(addresses: str) -> None:
    """What is no address would match nobody: all browsers would share one limit of attempts, and no one would know."""
    for address in addresses.split(","):
        try:
            ipaddress.ip_network(address.strip())
        except ValueError as error:
            raise ConfigError(f"--behind_proxy {addresses}: give the proxy's IP address ({error})") from None


def _check_certificate(cert: str, key: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")  # an encrypted key would ask
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls_cert {cert}, --tls_key {key}: cannot be used ({error})") from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio turns Nagle's algorithm off (40 ms a page) only on sockets that say their protocol
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(512)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there ({error.strerror or error})") from None
    return listening
