"""A store that speaks S3 on loopback, in a process of its own: moto's, with conditions that hold when many ask at once.

As a program: prints its port, and ends when its input is closed, which it is when the process that started it has ended.
"""

import io
import logging
import os
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@contextmanager
def running_server():
    """The address of a server, which runs until the block ends."""
    command = [sys.executable, "-W", "ignore", __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def make_bucket(server, name):
    """Makes a bucket on a server at an address."""
    with urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT"), timeout=120):
        pass


def environment_for(server):
    """The variables by which a process finds a server, or a proxy of it, at an address."""
    return ENVIRONMENT | {"AWS_ENDPOINT_URL": server, "NO_PROXY": "127.0.0.1"}


def one_at_a_time(application):
    """A WSGI application that reads a request before its turn: moto looks first and writes later."""
    turn = threading.Lock()

    def answer(environ, start_response):
        content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with turn:
            return list(application(environ | {"wsgi.input": io.BytesIO(content)}, start_response))

    return answer


def serve():
    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel("CRITICAL")
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    store = create_backend_app("s3")  # itself: moto lists a directory in each request to know which service is asked
    server = make_server("127.0.0.1", 0, one_at_a_time(store), threaded=True)
    threading.Thread(target=lambda: os._exit(bool(sys.stdin.buffer.read())), daemon=True).start()
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve()
