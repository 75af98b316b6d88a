"""Claims of pods: leases, and CDI files, which are also the checkpoint of the driver."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyaccel
from anyaccel.errors import AnyaccelError, LeaseNotFoundError, NotFreeError
from anyaccel.launcher import DEVICES_VARIABLE
from anyaccel.linux import write_whole
from anyaccel.model import ContainerEdits, Device, Value, replace
from anyaccel.text import printable
from anyaccel_export.cdi import cdi_edits
from anyaccel_export.slices import DRIVER, device_names

from anyaccel_kubernetes.node import KEY, Node, log, pod_groups

KIND = f"{DRIVER}/claim"
"""Kind of our devices in CDI."""
_VERSION, _GROUPS_VERSION = "0.5.0", "0.7.0"
"""Versions of CDI: names that begin with a digit, groups. Older engines refuse newer versions."""
KEPT_SECONDS = 600.0
"""A lease goes on for so long without the driver, and beyond that while a pod of the claim has processes."""
_VARIABLE = "ANYACCEL_CLAIM"
"""Variable with the claim, for the driver: annotations need a version of CDI that containerd 1.7 refuses."""
_UID = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z-]{0,62}")
_PREFIX = "anyaccel-claim-"


class Claim(Value):
    """An allocated claim, as far as this node is concerned.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        uid: Its identity.
        results: Allocated devices: names of ``request``, ``pool`` and ``device``, and the ``consumed`` capacity.
        pods: Names of the pods by identity.
    """

    namespace: str
    name: str
    uid: str
    results: tuple[Mapping[str, Any], ...]
    pods: Mapping[str, str]

    @property
    def key(self) -> str:
        """Key of the claim's lease."""
        return f"{KEY}/claim/{self.uid}"

    @property
    def note(self) -> str:
        """Purpose of the lease, for people on the node."""
        who = ", ".join(sorted(self.pods.values())) or f"claim {self.name}"
        return printable(f"pod {self.namespace}/{who}" if self.pods else f"{self.namespace}, {who}")[:200]


class ClaimError(AnyaccelError):
    """Raised when a claim cannot be prepared; the kubelet tries again, and shows the message at the pod."""


def parse_claim(found: Mapping[str, Any], uid: str, node: str) -> Claim:
    """Return an allocated claim of the API server.

    Args:
        found: The object.
        uid: The identity that the kubelet named.
        node: Name of the node's pool.

    Raises:
        ClaimError: If the claim is another one, is not allocated, or is allocated elsewhere.
    """
    meta, status = found["metadata"], found.get("status") or {}
    subject = f"claim {meta['namespace']}/{meta['name']}"
    if meta["uid"] != uid or not _UID.fullmatch(uid):
        raise ClaimError(f"{subject} is not the one that was asked for: its identity is {meta['uid']}, not {uid}")
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
    own = [each for each in results if each["driver"] == DRIVER]
    if not own:
        raise ClaimError(f"{subject} has no device of {DRIVER} allocated")
    if any(each.get("adminAccess") for each in own):  # a device beside its user's is against the lease of the user
        raise ClaimError(f"{subject} asks for admin access, which {DRIVER} does not give")
    if other := next((each["pool"] for each in own if each["pool"] != node), None):
        raise ClaimError(f"{subject} is allocated on node {other}, not on {node}")
    users = [each for each in status.get("reservedFor") or () if each.get("resource") == "pods"]
    return Claim(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=uid,
        results=tuple(
            {
                "request": each["request"],
                "pool": each["pool"],
                "device": each["device"],
                "consumed": dict(each.get("consumedCapacity") or {}),
            }
            for each in own
        ),
        pods={each["uid"]: each["name"] for each in users},
    )


class Claims:
    """The prepared claims of this node. Methods are thread-safe.

    Args:
        node: The node.
        name: Name of the node in the cluster.
        cdi: Folder of CDI files.
        dev: Prefix of device nodes on the host, for simulated machines on hosts without these nodes.
        cgroups: Where cgroup v2 is mounted.
    """

    def __init__(self, node: Node, name: str, cdi: str, *, dev: str = "", cgroups: str = "/sys/fs/cgroup") -> None:
        self._node, self._name, self._cdi = node, name, Path(cdi)
        self._dev, self._cgroups = dev, cgroups
        self._lock = threading.Lock()
        self._prepared: dict[str, Claim] = {}
        self.lost: dict[str, str] = {}
        """Reasons why devices of prepared claims are not leased any more, by device id."""

    @property
    def prepared(self) -> Mapping[str, Claim]:
        """The prepared claims by identity."""
        return dict(self._prepared)

    def adopt(self) -> None:
        """Take over the claims that were prepared before this process: by their CDI files, and renew the leases."""
        for half in self._cdi.glob(f"{_PREFIX}*.json.*.new"):  # of a driver that was killed while it wrote a file
            with contextlib.suppress(OSError):
                half.unlink()
        for path in sorted(self._cdi.glob(f"{_PREFIX}*.json")):
            try:
                claim = _read_claim(json.loads(path.read_text()))
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                log.error("%s is no CDI file of this driver: %s", path, error)
                continue
            if path == self._path(claim.uid):
                self._prepared[claim.uid] = claim
        self.renew()

    def prepare(self, claim: Claim) -> list[tuple[Mapping[str, Any], str]]:
        """Lease the devices of a claim, and write its CDI file; a second call changes nothing.

        Returns:
            Each result with its CDI device.

        Raises:
            ClaimError: If a device is unknown, or cannot be leased.
            AnyaccelError: If a plug-in or the ledger fails.
        """
        with self._lock:
            shares = self._shares(claim)
            self._lease(claim, shares)
            # After the lease: a container with this file has the devices for itself.
            self._write(claim, shares)
            self._prepared[claim.uid] = claim
        vendors = {name: device.vendor for name, device in self._devices().items()}
        return [(each, f"{KIND}={claim.uid}-{vendors[each['device']]}") for each in claim.results]

    def unprepare(self, uid: str) -> None:
        """Release the devices of a claim, and remove its CDI file; a second call changes nothing.

        Raises:
            AnyaccelError: If the ledger fails.
            OSError: If the file cannot be removed.
        """
        if not _UID.fullmatch(uid):
            raise ClaimError(f"a claim's identity must be letters, digits and hyphens (got {uid!r:.80})")
        with self._lock:
            key = f"{KEY}/claim/{uid}"
            # The lease first: a driver that is killed in between finds the file, and is asked once more.
            # By key, not by what this process remembers: the driver that leased the devices may have been killed.
            for lease in anyaccel.find_on_behalf(self._node.inventory, self._node.environ):
                if lease.key == key:
                    lease.release()
            self._path(uid).unlink(missing_ok=True)
            self._prepared.pop(uid, None)
        self._node.look()

    def renew(self) -> None:
        """Renew the leases of the prepared claims; acquire lost ones anew, and write missing CDI files.

        A device that meanwhile went to others is logged, and reported as unhealthy: its pod still runs.
        """
        with self._lock:
            lost: dict[str, str] = {}
            leases = {lease.key: lease for lease in anyaccel.find_on_behalf(self._node.inventory, self._node.environ)}
            for claim in list(self._prepared.values()):
                try:
                    self._renew(claim, leases.get(claim.key))
                except (AnyaccelError, OSError) as error:
                    log.warning("claim %s/%s: %s", claim.namespace, claim.name, error)
                    if isinstance(error, ClaimError):
                        devices = self._devices()
                        lost |= {devices[e["device"]].id: str(error) for e in claim.results if e["device"] in devices}
            self.lost = lost

    def _renew(self, claim: Claim, lease: anyaccel.LeaseOnBehalf | None) -> None:
        """Renew the lease of a prepared claim, or acquire it anew; write a missing CDI file.

        Raises:
            ClaimError: If a device is in use by others.
            AnyaccelError: If the ledger fails.
            OSError: If the file cannot be written.
        """
        shares = self._shares(claim)
        try:
            if lease is not None:
                lease.renew(KEPT_SECONDS, self._groups(claim))
        except LeaseNotFoundError:
            lease = None
        if lease is None:
            log.warning("claim %s/%s has lost its lease", claim.namespace, claim.name)
            self._lease(claim, shares)
        if not self._path(claim.uid).exists():
            self._write(claim, shares)

    def _devices(self) -> dict[str, Device]:
        """Return the devices by their names in the cluster."""
        names = device_names(self._node.inventory)
        return {names[device.id]: device for device in self._node.inventory.devices}

    def _shares(self, claim: Claim) -> list[tuple[Device, float | None]]:
        """Return the devices of a claim with their shares: a fraction, bytes of memory, or None for all.

        Raises:
            ClaimError: If a device is not there.
        """
        known, found = self._devices(), []
        for each in claim.results:
            device = known.get(each["device"])
            if device is None:
                raise ClaimError(f"claim {claim.namespace}/{claim.name} has device {each['device']}, which is gone")
            found.append((device, _share(device, each["consumed"])))
        return found

    def _groups(self, claim: Claim) -> tuple[str, ...]:
        return pod_groups(claim.pods, self._cgroups)

    def _lease(self, claim: Claim, shares: Sequence[tuple[Device, float | None]]) -> None:
        """Lease the devices of a claim, unless its lease is active.

        Raises:
            ClaimError: If a device is in use, or the active lease has other devices.
        """
        wanted = anyaccel.request_devices(
            [device for device, _ in shares], {device.id: share for device, share in shares if share is not None}
        )
        try:
            lease = anyaccel.acquire_on_behalf(
                wanted, claim.key, seconds=KEPT_SECONDS, groups=self._groups(claim), note=claim.note,
                inventory=self._node.inventory, environ=self._node.environ, unallocated="inherit",
            )  # fmt: skip
        except (NotFreeError, anyaccel.NeverFitsError) as error:
            raise ClaimError(f"claim {claim.namespace}/{claim.name}: {error}", hint=error.hint) from error
        if {device.id for device in lease.devices} != {device.id for device, _ in shares}:
            raise ClaimError(f"claim {claim.namespace}/{claim.name} was prepared with other devices")

    def _path(self, uid: str) -> Path:
        return self._cdi / f"{_PREFIX}{uid}.json"

    def _write(self, claim: Claim, shares: Sequence[tuple[Device, float | None]]) -> None:
        """Write the CDI file of a claim, in one step: a device per vendor, since a mask depends on all devices."""
        by_vendor: dict[str, list[tuple[Device, float | None]]] = {}
        for each in shares:
            by_vendor.setdefault(each[0].vendor, []).append(each)
        devices: list[dict[str, Any]] = [
            {"name": f"{claim.uid}-{vendor}", "containerEdits": self._edits(own)} for vendor, own in by_vendor.items()
        ]
        for entry in devices:
            entry["containerEdits"].setdefault("env", []).append(f"{_VARIABLE}={json.dumps(_to_json(claim))}")
        # The lowest version that will do, since older engines refuse the file otherwise.
        groups = any("additionalGids" in entry["containerEdits"] for entry in devices)
        document = {"cdiVersion": _GROUPS_VERSION if groups else _VERSION, "kind": KIND, "devices": devices}
        self._cdi.mkdir(parents=True, exist_ok=True)
        write_whole(str(self._path(claim.uid)), json.dumps(document, indent=2) + "\n")

    def _edits(self, shares: Sequence[tuple[Device, float | None]]) -> dict[str, Any]:
        edits = cdi_edits(edits_for(self._node, shares))
        for node in edits.get("deviceNodes", ()):
            node["hostPath"] = self._dev + node["path"]
        return edits


def edits_for(node: Node, shares: Sequence[tuple[Device, float | None]]) -> ContainerEdits:
    """Return what a container needs for devices or shares of one vendor, with the limits of the shares.

    Args:
        node: The node.
        shares: The devices, each with a fraction, bytes of memory, or None for all of it.
    """
    devices = [device for device, _ in shares]
    edits = anyaccel.container(devices)
    env = {DEVICES_VARIABLE: ",".join(device.id for device in devices)}
    given = {device.id: share for device, share in shares if share is not None}
    if given:
        held = anyaccel.open_scheduler(node.inventory).allocate(anyaccel.request_devices(devices, given))
        worker = anyaccel.worker_environment(held, node.inventory, environ=node.environ, unallocated="inherit")
        env |= {name: value for name, value in worker.set.items() if "ALLOCATION" not in name and "LEASE" not in name}
    return replace(edits, env=env | dict(edits.env))


def _share(device: Device, consumed: Mapping[str, Any]) -> float | None:
    """Return the share of a device by the consumed capacity; None for the whole device."""
    capacities = {name.rpartition("/")[2]: parse_quantity(str(value)) for name, value in consumed.items()}
    if device.slots > 1 and (slots := capacities.get("slots")):
        return None if slots >= device.slots else slots / device.slots
    memory = capacities.get("memory")
    if not memory or not device.memory_bytes or memory >= device.memory_bytes:
        return None
    return memory


_UNITS = {"": 1, "m": 1e-3, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18} | {
    f"{name}i": 1 << 10 * power for power, name in enumerate("KMGTPE", 1)
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?)([a-zA-Z]*)")


def parse_quantity(text: str) -> int:
    """Return a quantity of Kubernetes, such as ``20Gi``, as a whole number.

    Raises:
        ClaimError: If the text is no quantity.
    """
    match = _QUANTITY.fullmatch(text)
    with contextlib.suppress(ValueError, OverflowError):
        if match and match[2] in _UNITS:
            return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(int(match[1]) * _UNITS[match[2]])
        return int(float(text))  # with an exponent
    raise ClaimError(f"a quantity of the API server is not understood: {text!r:.80}")


def _read_claim(document: Mapping[str, Any]) -> Claim:
    """Return the claim of a CDI file.

    Raises:
        KeyError, IndexError, TypeError, ValueError: If the file has none.
    """
    variables = document["devices"][0]["containerEdits"]["env"]
    (text,) = (each.partition("=")[2] for each in variables if each.startswith(f"{_VARIABLE}="))
    values = json.loads(text)
    return Claim(**{**values, "results": tuple(values["results"])})


def _to_json(claim: Claim) -> dict[str, Any]:
    """Return a claim as JSON values."""
    return {
        "namespace": claim.namespace, "name": claim.name, "uid": claim.uid,
        "results": [dict(each) for each in claim.results], "pods": dict(claim.pods),
    }  # fmt: skip
