"""Ports for the servers that tests and their ranks open."""

import secrets
import socket


def free_port() -> int:
    """A port of this machine at which nobody listens.

    It is below those that systems give to connections: one of another test would take it before the server has opened it.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as asked:
            try:
                asked.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
