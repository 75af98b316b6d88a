"""What a host knows about the slice that it belongs to: from GKE's variables, then from the metadata server.

None of this counts chips: the variables can say otherwise than the hardware (Colab announces four chips for one).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from anyaccel.plugin import ProbeContext, QueryError

from anyaccel_tpu import metadata
from anyaccel_tpu.products import Generation
from anyaccel_tpu.slices import is_topology, parse_type, pod_type, slice_shape

_LINE = re.compile(r"\s*(\w+)\s*:\s*(?:'([^']*)'|\"([^\"]*)\"|(\S*))\s*")
_NOT_SKIPPED = {"", "0", "false", "no"}
_VM_SIZES = (4, 8)
_VARIABLES = {
    "accelerator_type": "TPU_ACCELERATOR_TYPE",
    "topology": "TPU_TOPOLOGY",
    "worker_id": "TPU_WORKER_ID",
    "name": "TPU_NAME",
}


@dataclass(slots=True, kw_only=True)
class SliceFacts:
    """What is known about the slice.

    Attributes:
        accelerator_type: Its type as Google writes it, such as ``tpu7x-16``.
        topology: Grid of its chips.
        worker_id: Position of this host in it.
        name: Its name.
        notes: What could not be understood or asked, and announced maintenance, in sentences.
    """

    accelerator_type: str | None = None
    topology: str | None = None
    worker_id: int | None = None
    name: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def generation(self) -> Generation | None:
        """The generation that the type names."""
        return parse_type(self.accelerator_type)[0] if self.accelerator_type else None

    def attributes(self, chips_here: int) -> dict[str, str | int]:
        """The facts as attributes of each chip of this host; what is unknown is left out."""
        found: dict[str, str | int | None] = {
            "accelerator_type": self.accelerator_type,
            "pod_type": pod_type(self.accelerator_type) if self.accelerator_type else None,
            "topology": self.topology,
            "worker_id": self.worker_id,
            "slice_name": self.name,
        }
        if self.accelerator_type:
            try:
                shape = slice_shape(self.accelerator_type, chips_here if chips_here in _VM_SIZES else None)
            except ValueError as error:
                self.notes.append(f"{error}; hosts and chips of the slice are unknown")
            else:
                found |= {"slice_chips": shape.chips, "slice_hosts": shape.hosts}
                found["topology"] = self.topology or shape.topology
        return {name: value for name, value in found.items() if value is not None}


def gather(ctx: ProbeContext, *, tpu_seen: bool) -> SliceFacts:
    """Gather the facts.

    Args:
        ctx: The machine.
        tpu_seen: Whether PCI shows a TPU. Without one, the metadata server is asked on Google's machines alone.
    """
    facts = SliceFacts()
    environ = ctx.environ
    _take(facts, "the environment", {name: environ.get(variable) for name, variable in _VARIABLES.items()})
    complete = None not in (facts.accelerator_type, facts.topology, facts.worker_id, facts.name)
    if complete or _skipped(environ) or not (tpu_seen or on_google(ctx)):
        return facts
    try:
        _from_metadata(facts, metadata.ask(ctx))
    except QueryError as error:
        facts.notes.append(
            f"the metadata server told nothing about the slice: {error};"
            " set TPU_ACCELERATOR_TYPE, TPU_WORKER_ID and TPU_NAME where they matter"
        )
    return facts


def on_google(ctx: ProbeContext) -> bool:
    """Whether the firmware says that this is a machine of Google's cloud."""
    try:
        return (ctx.read("/sys/class/dmi/id/product_name") or "").startswith("Google")
    except OSError:
        return False


def _skipped(environ: Mapping[str, str]) -> bool:
    return environ.get("TPU_SKIP_MDS_QUERY", "").strip().lower() not in _NOT_SKIPPED


def _from_metadata(facts: SliceFacts, answers: Mapping[str, str]) -> None:
    """Fill in what the environment left open, first from the keys, then from either dialect of ``tpu-env``."""
    env = parse_tpu_env(answers.get("attributes/tpu-env", ""), facts.notes)
    _take(
        facts,
        "the metadata server",
        {
            "accelerator_type": answers.get("attributes/accelerator-type")
            or env.get("ACCELERATOR_TYPE")
            or env.get("TPU_ACCELERATOR_TYPE"),
            "topology": env.get("TOPOLOGY") or env.get("TPU_TOPOLOGY"),
            "worker_id": answers.get("attributes/agent-worker-number")
            or env.get("WORKER_ID")
            or env.get("TPU_WORKER_ID"),
            "name": answers.get("attributes/instance-id"),
        },
    )
    event = answers.get("maintenance-event", "NONE")
    if event != "NONE":
        facts.notes.append(
            f"Google announces maintenance of this host: {event}; save a checkpoint and take the host out of service"
        )


def parse_tpu_env(text: str, notes: list[str]) -> dict[str, str]:
    """Read the lines ``KEY: 'value'`` of the metadata key ``tpu-env``; a line of another form becomes a note.

    Cloud TPU's own VMs write ``ACCELERATOR_TYPE`` and ``WORKER_ID``, TPU machines of Compute Engine write the same
    names with ``TPU_`` before them (a KeyError in pytorch/xla); callers look for both.
    """
    found = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match:
            found[match[1]] = match[2] or match[3] or match[4] or ""
        elif line.strip():
            notes.append(f"a line of the metadata key tpu-env must be KEY: 'value' (got {line!r}); it was left out")
    return found


def _take(facts: SliceFacts, source: str, found: Mapping[str, str | None]) -> None:
    """Keep what is new and well formed; what is not well formed becomes a note, since no chip depends on it."""
    kind, topology, worker = (found.get(name) or "" for name in ("accelerator_type", "topology", "worker_id"))
    if facts.accelerator_type is None and kind:
        try:
            parse_type(kind)
            facts.accelerator_type = kind.strip()
        except ValueError as error:
            facts.notes.append(f"{source}: {error}")
    if facts.topology is None and topology:
        if is_topology(topology.strip().lower()):
            facts.topology = topology.strip().lower()
        else:
            facts.notes.append(f"{source}: a TPU topology must be like 4x4 or 2x2x2 (got {topology!r}); correct it")
    if facts.worker_id is None and worker:
        if worker.strip().isdecimal():
            facts.worker_id = int(worker)
        else:
            facts.notes.append(f"{source}: a TPU worker id must be a whole number (got {worker!r}); correct it")
    facts.name = facts.name or (found.get("name") or "").strip() or None
