"""Machines for the tests: recordings, real directory trees, real HTTP servers, simulated devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from anyaccel.plugin import Device, ProbeContext, Product
from anyaccel.probe.context import Json, ask
from anyaccel.probe.host import HostFacts
from anyaccel_testing import context, load_recording
from anyaccel_tpu import metadata, plugin
from servers import QuietHTTPServer
from waiting import PATIENCE

RECORDINGS = Path(__file__).parent.parent / "recordings"


class TreeFacts(HostFacts):
    """A directory tree as the machine; queries run on this host."""

    def query(self, name: str, fn: Callable[[], Json]) -> Json:
        return ask(fn)


class Tree:
    """A machine made of real files below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # The metadata server is asked on Google's machines alone.
        self.text("/sys/class/dmi/id/product_name", "Google Compute Engine\n")

    def text(self, path: str, text: str) -> None:
        where = self.root / path.lstrip("/")
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)

    def pci(
        self,
        address: str,
        device: str,
        *,
        vendor: str = "0x1ae0",
        subsystem: str | None = None,
        group: str | None = None,
        driver: str | None = None,
    ) -> None:
        base = f"/sys/bus/pci/devices/{address}"
        self.text(f"{base}/vendor", vendor + "\n")
        self.text(f"{base}/device", device + "\n")
        self.text(f"{base}/class", "0xff0000\n")
        if subsystem is not None:
            self.text(f"{base}/subsystem_device", subsystem + "\n")
        where = self.root / base.lstrip("/")
        if group is not None:
            (where / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{group}")
        if driver is not None:
            (where / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")

    def group(self, number: str, address: str, device: str, vendor: str = "0x1ae0") -> None:
        base = f"/sys/kernel/iommu_groups/{number}/devices/{address}"
        self.text(f"{base}/vendor", vendor + "\n")
        self.text(f"{base}/device", device + "\n")

    def node(self, *paths: str) -> None:
        """Make device nodes: links to /dev/null, which is a real character device and needs no privilege."""
        for path in paths:
            where = self.root / path.lstrip("/")
            where.parent.mkdir(parents=True, exist_ok=True)
            # Making a device node of our own would need root.
            where.symlink_to("/dev/null")

    def context(self, environ: Mapping[str, str] | None = None) -> ProbeContext:
        return ProbeContext(TreeFacts(environ or {}, str(self.root)), time.monotonic() + PATIENCE)

    def detect(self, environ: Mapping[str, str] | None = None) -> Any:
        return plugin.anyaccel_detect(self.context({"TPU_SKIP_MDS_QUERY": "1"} if environ is None else environ))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "root")


@pytest.fixture
def recorded() -> Callable[..., ProbeContext]:
    def make(name: str, environ: Mapping[str, str] | None = None) -> ProbeContext:
        return context(load_recording(RECORDINGS / name), environ=environ)

    return make


@pytest.fixture
def detected(recorded: Callable[..., ProbeContext]) -> Callable[[str], tuple[Device, ...]]:
    def make(name: str) -> tuple[Device, ...]:
        found = plugin.anyaccel_detect(recorded(name))
        assert found is not None
        return found.devices

    return make


def simulate(product: Product, count: int) -> tuple[Device, ...]:
    """Simulated devices of a product: linked alike, without nodes."""
    ids = [product.id_template.format(pci=f"0000:{index:02x}:00.0", index=index, uuid=index) for index in range(count)]
    device = Device(id="", index=0, model=product.model, memory_bytes=product.memory_bytes)
    return tuple(
        replace(
            device,
            id=ids[index],
            index=index,
            links={other: product.link for other in ids if other != ids[index]} if product.link else {},
            nodes=tuple(template.format(index=index) for template in product.node_templates),
            attributes=product.attributes,
        )
        for index in range(count)
    )


@pytest.fixture
def chips() -> Callable[..., tuple[Device, ...]]:
    products = {product.name: product for product in plugin.anyaccel_products()}
    return lambda tag, count: simulate(products[tag], count)


class MetadataServer:
    """A real HTTP server with the answers of Google's metadata server, or with faults."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.status: int | None = None
        self.flavor: str | None = "Google"
        self.drip = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # headers and body in one packet

            def do_GET(self) -> None:
                outer.requests.append((self.path, self.headers.get("Metadata-Flavor")))
                text = outer.answers.get(self.path.removeprefix("/computeMetadata/v1/instance/"))
                body = (text if text is not None else "not found").encode()
                self.send_response(outer.status or (200 if text is not None else 404))
                if outer.flavor:
                    self.send_header("Metadata-Flavor", outer.flavor)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                for start in range(0, len(body), 1 if outer.drip else len(body)):
                    try:
                        self.wfile.write(body[start : start + 1] if outer.drip else body)
                        self.wfile.flush()
                    except OSError:
                        self.close_connection = True
                        return
                    if outer.drip:
                        time.sleep(0.2)

            def log_message(self, *args: object) -> None:
                return

        self.server = QuietHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def metadata_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    """A server that answers."""
    monkeypatch.setattr(metadata, "SECONDS", PATIENCE)
    served = MetadataServer()
    with closing(served.server.socket):
        thread = threading.Thread(target=lambda: served.server.serve_forever(poll_interval=0.02), daemon=True)
        thread.start()
        yield served
        served.server.shutdown()
        thread.join()
