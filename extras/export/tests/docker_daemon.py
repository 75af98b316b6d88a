"""What the docker command asks its daemon to create: the real client, and a daemon that writes the request down."""

import http.server
import json
import os
import socketserver
import subprocess
import tempfile
import threading

from servers import Quiet


class Daemon(Quiet, socketserver.ThreadingUnixStreamServer):
    """A server that has ended with all its threads when it is closed."""

    daemon_threads = False


def request(*flags):
    """The request of ``docker create`` with these flags, or what docker says when it refuses them."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, content, status=200):
            body = json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Api-Version": "1.47", "OSType": "linux", "Content-Type": "application/json"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self):
            self.answer("OK")

        def do_GET(self):
            self.answer({"Containers": 0, "OSType": "linux"})

        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer({"Id": "0" * 64, "Warnings": []}, 201)

        def log_message(self, *_):
            pass

        def address_string(self):
            return "docker"

    with tempfile.TemporaryDirectory() as folder:  # the path of a socket must be short
        address = os.path.join(folder, "docker.sock")
        with Daemon(address, Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                done = subprocess.run(
                    ["docker", "create", *flags, "image"],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                    env={**os.environ, "DOCKER_HOST": f"unix://{address}", "DOCKER_CONFIG": folder},
                )
            finally:
                server.shutdown()
    return asked[0] if asked else done.stderr
