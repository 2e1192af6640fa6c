"""Open the nodes' part of a SuperLink to the outside, and nothing else.

    python fleet_proxy.py keys --port 9443 --superlink 127.0.0.1:8000

The SuperLink answers nodes and the `flwr` command on the same port. Flower 1.41 asks nodes for a key, and `flwr` for
none: whoever reaches the port can register nodes, and can run code where the weights lie. So let the SuperLink listen
on the loopback address only, and let nodes come through this proxy, which passes on what is under /v1/fleet/ and
answers 403 to everything else. It is made for a trial; a deployment puts the same rule into its own reverse proxy.
"""

import argparse
import http.client
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FLEET = "/v1/fleet/"
BETWEEN_TWO = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "date", "server"}
"""Headers that belong to one connection and are not passed on."""


class Proxy(ThreadingHTTPServer):
    """Listens with the server's certificate and speaks to the SuperLink, whose certificate it checks."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], superlink: str, keys: Path) -> None:
        super().__init__(address, Visit)
        self.superlink = superlink
        self.inside = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        self.outside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.outside.load_cert_chain(keys / "server.crt", keys / "server.key")

    def handle_error(self, request: object, client_address: object) -> None:
        """Say in one line that a connection broke, as when somebody speaks no TLS."""
        print(f"{client_address}: {sys.exception()!r}", file=sys.stderr)


class Visit(BaseHTTPRequestHandler):
    """One node's connection."""

    server: Proxy
    protocol_version = "HTTP/1.1"
    timeout = 600.0

    def setup(self) -> None:
        # Here and not where connections are accepted: a visitor that does not speak must not keep the others waiting.
        self.request.settimeout(self.timeout)
        self.request = self.server.outside.wrap_socket(self.request, server_side=True)
        super().setup()

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not self.path.startswith(FLEET) or ".." in self.path or "%" in self.path or not length.isdecimal():
            self.close_connection = True
            if length.isdecimal():
                self.rfile.read(min(int(length), 1 << 20))  # who is cut off while still sending may miss the answer
            self.send_error(403, f"only {FLEET} is open here")
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in BETWEEN_TWO}
        body = self.rfile.read(int(length))
        inner = http.client.HTTPSConnection(self.server.superlink, context=self.server.inside, timeout=self.timeout)
        try:
            inner.request("POST", self.path, body, headers)
            answer = inner.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            self.send_error(502, "the SuperLink does not answer")
            return
        finally:
            inner.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in BETWEEN_TWO:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.send_error(403, f"only {FLEET} is open here")

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing of what is passed on; nodes ask every few seconds."""

    def log_error(self, format: str, *values: object) -> None:
        super().log_message(format, *values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Open the nodes' part of a SuperLink, and nothing else.")
    parser.add_argument("keys", type=Path, help="a folder made by make_keys.py")
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen on (all)")
    parser.add_argument("--port", type=int, default=9443, help="the port to listen on (9443)")
    parser.add_argument("--superlink", default="127.0.0.1:8000", help="where the SuperLink listens (127.0.0.1:8000)")
    given = parser.parse_args()
    with Proxy((given.host, given.port), given.superlink, given.keys) as proxy:
        print(f"open: {FLEET} of {given.superlink}, at {given.host}:{given.port}", flush=True)
        proxy.serve_forever()


if __name__ == "__main__":
    main()
