"""An API server over real HTTP, with the rules of the real one that a driver meets."""

import copy
import itertools
import json
import queue
import ssl
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler

import published_schemas
import slice_rules
from jsonschema import ValidationError
from servers import QuietHTTPServer

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/"
FOREIGN = {"driver": "nic.example", "request": "n", "pool": "p", "device": "d"}
"""A device of another driver in each claim."""


class FakeApi:
    """Stores slices and claims.

    Attributes:
        token: The bearer token that is valid now; None for any.
        lacks: Fields of devices that are dropped, as without their feature gates.
        refused: Messages of refused objects.
        requests: Method and path of each request.
    """

    def __init__(self, certificate=None):
        self.slices, self.claims, self.token, self.lacks = {}, {}, None, ()
        self.refused, self.requests, self.conflicts = [], [], 0
        self.changed = threading.Condition()
        self._versions, self._watchers, self._events = itertools.count(1), [], []
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def handle_one_request(self):
                try:
                    super().handle_one_request()
                except (ConnectionError, ssl.SSLError):
                    self.close_connection = True

            def answer(self, code, value):
                body = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def refuse(self, code, message):
                self.answer(code, {"kind": "Status", "status": "Failure", "code": code, "message": message})

            def do(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                api.requests.append((self.command, url.path))
                if api.token is not None and self.headers.get("Authorization") != f"Bearer {api.token}":
                    self.refuse(401, "Unauthorized")
                elif query.get("watch"):
                    api.serve_watch(self, query)
                else:
                    api.serve(self, self.command, url.path, body)

            do_GET = do_POST = do_PUT = do_DELETE = do  # noqa: N815

        self._server = QuietHTTPServer(("127.0.0.1", 0), Handler)
        scheme = "http"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self.break_watches()
        self._server.shutdown()
        self._server.server_close()

    def serve(self, handler, method, path, body):
        with self.changed:
            if path.startswith(CLAIMS):
                claim = self.claims.get(path.removeprefix(CLAIMS))
                return handler.answer(200, claim) if claim else handler.refuse(404, "claim not found")
            name = path.removeprefix(SLICES).strip("/")
            found = self.slices.get(name)
            if method == "GET" and not name:
                meta = {"resourceVersion": str(next(self._versions))}
                return handler.answer(200, {"metadata": meta, "items": list(self.slices.values())})
            if method == "GET":
                return handler.answer(200, found) if found else handler.refuse(404, "slice not found")
            if method == "DELETE":
                if not found:
                    return handler.refuse(404, "slice not found")
                self.delete(name)
                return handler.answer(200, {"kind": "Status"})
            return self._write(handler, method, name, found, body)

    def _write(self, handler, method, name, found, body):
        try:
            plain = {**body, "metadata": {"name": body["metadata"]["name"]}}
            if published_schemas.INSTALLED:
                published_schemas.check(plain, published_schemas.NAMED[-1:])
            slice_rules.check(plain)
            if found:
                for field in ("driver", "nodeName"):
                    slice_rules.need(found["spec"][field] == body["spec"][field], f"{field} is immutable")
                slice_rules.need(found["spec"]["pool"]["name"] == body["spec"]["pool"]["name"], "pool is immutable")
        except (slice_rules.InvalidError, ValidationError) as error:
            self.refused.append(str(error))
            return handler.refuse(422, f"invalid: {error}")
        if method == "POST" and body["metadata"]["name"] in self.slices:
            return handler.refuse(409, "already exists")
        if method == "PUT" and not found:
            return handler.refuse(404, "slice not found")
        if method == "PUT" and body["metadata"].get("resourceVersion") != found["metadata"]["resourceVersion"]:
            self.conflicts += 1
            return handler.refuse(409, "the object has been modified")
        name = body["metadata"]["name"]
        stored = copy.deepcopy(plain)
        for device in stored["spec"].get("devices", ()):
            for field in self.lacks:
                device.pop(field, None)
        self.store(name, stored, "MODIFIED" if found else "ADDED")
        return handler.answer(200 if found else 201, stored)

    def store(self, name, stored, kind="MODIFIED"):
        stored["metadata"]["resourceVersion"] = str(next(self._versions))
        self.slices[name] = stored
        self._tell(kind, stored)

    def delete(self, name):
        with self.changed:
            self._tell("DELETED", self.slices.pop(name))

    def touch(self):
        """Let another client change each slice without a change of what it says."""
        with self.changed:
            for name, stored in list(self.slices.items()):
                self.store(name, copy.deepcopy(stored))

    def _tell(self, kind, stored):
        event = {"type": kind, "object": stored}
        self._events.append((next(self._versions), event))
        for watcher in self._watchers:
            watcher.put(event)
        self.changed.notify_all()

    def serve_watch(self, handler, query):
        events = queue.Queue()
        with self.changed:
            for version, event in self._events:  # what came between the list and this watch, as in a cluster
                if version > int(query["resourceVersion"]):
                    events.put(event)
            self._watchers.append(events)
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        handler.wfile.flush()
        while (event := events.get()) is not None:
            handler.wfile.write(json.dumps(event).encode() + b"\n")
            handler.wfile.flush()
        with self.changed:
            self._watchers.remove(events)

    def break_watches(self):
        with self.changed:
            for watcher in self._watchers:
                watcher.put(None)

    def devices(self):
        """The devices of the pool by name, if it is complete."""
        slices = [each for each in self.slices.values() if each["spec"]["driver"] == "anyaccel.dev"]
        newest = max((each["spec"]["pool"]["generation"] for each in slices), default=0)
        slices = [each for each in slices if each["spec"]["pool"]["generation"] == newest]
        if not slices or len(slices) != slices[0]["spec"]["pool"]["resourceSliceCount"]:
            return {}
        slice_rules.check_pool(slices)
        return {device["name"]: device for each in slices for device in each["spec"].get("devices", ())}

    def until(self, holds, seconds=60.0):
        """Wait until something holds of the devices of the pool."""
        with self.changed:
            assert self.changed.wait_for(lambda: holds(self.devices()), seconds), (self.devices(), self.refused)

    def allocate(self, name, uid, devices, *, pods=(), capacity=None):
        """Store a claim with allocated devices, as the scheduler does."""
        results = [
            {"request": "r", "driver": "anyaccel.dev", "pool": "n1", "device": device}
            | ({"consumedCapacity": capacity, "shareID": "s"} if capacity else {})
            for device in devices
        ]
        self.claims[name] = {
            "metadata": {"name": name, "namespace": "default", "uid": uid},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": [*results, FOREIGN]}},
                "reservedFor": [{"resource": "pods", "name": pod, "uid": f"{pod}-uid"} for pod in pods],
            },
        }
