"""Slices: accelerator types such as ``v6e-16``, and the facts of a host about its slice.

These facts never count chips: variables may contradict the hardware (Colab announces four chips for a single chip).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from anyaccel.kit import Catalog, Entry, text
from anyaccel.plugin import ProbeContext, QueryError

from anyaccel_tpu import metadata

CATALOG = Catalog(__file__)
V2_OR_V3 = "v2-or-v3"
SKIP_METADATA = "TPU_SKIP_MDS_QUERY"
_TYPE = re.compile(r"(?:v|tpu)(\d+[a-z]*)-([1-9]\d*)", re.IGNORECASE)
_TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")
_ENV_LINE = re.compile(r"\s*(\w+)\s*:\s*(?:'([^']*)'|\"([^\"]*)\"|(\S*))\s*")
_NOT_SKIPPED = {"", "0", "false", "no"}
_CHIPS_PER_VM = 4
_VM_SIZES = (4, 8)
_CUBE = 64


class SliceShape(NamedTuple):
    """The shape of a slice."""

    chips: int  # on every host together
    hosts: int  # virtual machines
    topology: str | None  # grid of the chips such as 2x2x4; None where the number of chips leaves several


def parse_type(written: str) -> tuple[Entry, int]:
    """Split an accelerator type into its generation and the number behind the dash.

    Both ``tpu7x-8`` (Google) and ``v7x-8`` (Ray), both ``v5litepod-4`` and ``v5e-4`` are valid.

    Raises:
        ValueError: When it is no accelerator type of a known generation.
    """
    match = _TYPE.fullmatch(written.strip())
    key = f"v{match[1].lower()}" if match else ""
    # Google's API and its documents use different names for v5e.
    entry = CATALOG.get("v5litepod" if key == "v5e" else key)
    if match is None or entry is None:
        keys = ", ".join(entry.key for entry in CATALOG.entries if entry.key != V2_OR_V3)
        raise ValueError(
            f"a TPU accelerator type must be GENERATION-NUMBER with one of {keys} (got {written!r}); write for example"
            " v4-8, v6e-16 or tpu7x-8"
        )
    return entry, int(match[2])


def pod_type(accelerator_type: str) -> str:
    """Convert an accelerator type to the form of Ray's resources and labels: ``tpu7x-16`` becomes ``v7x-16``.

    Raises:
        ValueError: When it is no accelerator type of a known generation.
    """
    entry, number = parse_type(accelerator_type)
    return f"{entry.key}-{number}"


def slice_shape(accelerator_type: str, chips_per_vm: int | None = None) -> SliceShape:
    """Return chips, hosts and topology of an accelerator type.

    Args:
        accelerator_type: For example ``v5p-128``. The number counts TensorCores for v2, v3, v4, v5p and tpu7x, and
            chips for v5e and v6e.
        chips_per_vm: Chips of one host where known. It decides between one host of 8 chips and two hosts of 4, which
            the type ``v6e-8`` leaves open; without it, 8 chips of v5e and v6e are one host.

    Raises:
        ValueError: A slice of this type cannot exist; the message names the broken rule.
    """
    entry, number = parse_type(accelerator_type)
    if "cores" not in entry.facts:
        raise ValueError(f"the slices of {entry.model} are not published (got {accelerator_type!r})")
    cores, counts, axes, most = (entry.facts[name] for name in ("cores", "counts", "dimensions", "max_chips"))
    chips, rest = divmod(number, cores)
    # Up to a host's maximum the type means one host; above, hosts have four chips.
    per_vm = chips_per_vm or (max(counts) if chips <= max(counts) else _CHIPS_PER_VM)
    rule = ""
    if rest:
        rule = f"the number of a {entry.key} type counts TensorCores, {cores} per chip, and must be a multiple of that"
    elif chips > most:
        rule = f"a slice of {entry.model} has at most {most} chips"
    elif axes == 3 and chips > _CUBE and chips % _CUBE:  # noqa: PLR2004
        rule = f"a slice of {entry.model} above 64 chips must be whole 4x4x4 cubes, a multiple of 64 chips"
    elif chips > per_vm and chips % per_vm:
        rule = f"a slice of several hosts must have a multiple of {per_vm} chips"
    elif chips <= per_vm and chips not in counts:
        rule = f"one host of {entry.model} has {', '.join(map(str, counts))} chips"
    if rule:
        raise ValueError(f"{rule} (got {accelerator_type!r}: {number / cores:g} chips)")
    return SliceShape(chips, max(1, chips // per_vm), CATALOG.data["topologies"][str(axes)].get(str(chips)))


def _type(written: str) -> str:
    parse_type(written)
    return written


def _topology(written: str) -> str:
    if not _TOPOLOGY.fullmatch(written.lower()):
        raise ValueError(f"a TPU topology must be like 4x4 or 2x2x2 (got {written!r}); correct it")
    return written.lower()


def _worker_id(written: str) -> int:
    if not written.isdecimal():
        raise ValueError(f"a TPU worker id must be a whole number (got {written!r}); correct it")
    return int(written)


class _Fact(NamedTuple):
    """Sources of a fact: GKE's variable, the metadata server's key, lines of its ``tpu-env``; and its parser."""

    variable: str
    key: str
    lines: tuple[str, ...]
    read: Callable[[str], str | int]


# Cloud TPU's own VMs write ACCELERATOR_TYPE and WORKER_ID into tpu-env, TPU machines of Compute Engine write the same
# names with TPU_ before them (a KeyError in pytorch/xla).
_TYPES, _GRIDS = ("ACCELERATOR_TYPE", "TPU_ACCELERATOR_TYPE"), ("TOPOLOGY", "TPU_TOPOLOGY")
_FACTS = {
    "accelerator_type": _Fact("TPU_ACCELERATOR_TYPE", "attributes/accelerator-type", _TYPES, _type),
    "topology": _Fact("TPU_TOPOLOGY", "", _GRIDS, _topology),
    "worker_id": _Fact("TPU_WORKER_ID", "attributes/agent-worker-number", ("WORKER_ID", "TPU_WORKER_ID"), _worker_id),
    "slice_name": _Fact("TPU_NAME", "attributes/instance-id", (), str),
}
"""Facts by attribute."""


class Slice:
    """The facts about the slice: from GKE's variables, then from the metadata server.

    Attributes:
        known: The facts, as attributes of chips.
        notes: Failures, and announced maintenance, in sentences.
    """

    def __init__(self, ctx: ProbeContext, *, tpu_seen: bool) -> None:
        """Gather the facts.

        Args:
            ctx: The machine.
            tpu_seen: Whether PCI shows a TPU. Without one, the metadata server is asked on Google's machines alone.
        """
        self.known: dict[str, str | int] = {}
        self.notes: list[str] = []
        self._add_facts("the environment", {name: ctx.environ.get(fact.variable, "") for name, fact in _FACTS.items()})
        skipped = ctx.environ.get(SKIP_METADATA, "").strip().lower() not in _NOT_SKIPPED
        google = tpu_seen or text(ctx, "/sys/class/dmi/id/product_name").startswith("Google")
        if skipped or not google or self.known.keys() == _FACTS.keys():
            return
        try:
            answers = metadata.ask(ctx)
        except QueryError as error:
            self.notes.append(
                f"the metadata server told nothing about the slice: {error};"
                " set TPU_ACCELERATOR_TYPE, TPU_WORKER_ID and TPU_NAME where they matter"
            )
            return
        lines = self._env_lines(answers.get("attributes/tpu-env", ""))
        found = {
            name: next(filter(None, (answers.get(fact.key), *map(lines.get, fact.lines))), "")
            for name, fact in _FACTS.items()
        }
        self._add_facts("the metadata server", found)
        event = answers.get("maintenance-event", "NONE")
        if event != "NONE":
            self.notes.append(
                f"Google announces maintenance of this host: {event}; save a checkpoint and take the host out of"
                " service"
            )

    def _add_facts(self, source: str, found: Mapping[str, str]) -> None:
        """Keep new, well-formed facts. A malformed fact becomes a note, since no chip depends on it."""
        for name, written in found.items():
            if written.strip() and name not in self.known:
                try:
                    self.known[name] = _FACTS[name].read(written.strip())
                except ValueError as error:
                    self.notes.append(f"{source}: {error}")

    def _env_lines(self, written: str) -> dict[str, str]:
        """Parse the lines ``KEY: 'value'`` of the metadata key ``tpu-env``; a malformed line becomes a note."""
        found = {}
        for line in filter(str.strip, written.splitlines()):
            match = _ENV_LINE.fullmatch(line)
            if match:
                found[match[1]] = match[2] or match[3] or match[4] or ""
            else:
                note = f"a line of the metadata key tpu-env must be KEY: 'value' (got {line!r}); it was left out"
                self.notes.append(note)
        return found

    @property
    def accelerator_type(self) -> str:
        """Google's name of the type, such as ``tpu7x-16``; empty if unknown."""
        return str(self.known.get("accelerator_type", ""))

    @property
    def generation(self) -> Entry | None:
        """The generation in the type, or None."""
        return parse_type(self.accelerator_type)[0] if self.accelerator_type else None

    def attributes(self, chips_here: int) -> Mapping[str, str | int]:
        """Return the facts as attributes of each chip of this host, without unknown facts."""
        if not self.accelerator_type:
            return self.known
        found = {**self.known, "pod_type": pod_type(self.accelerator_type)}
        try:
            shape = slice_shape(self.accelerator_type, chips_here if chips_here in _VM_SIZES else None)
        except ValueError as error:
            self.notes.append(f"{error}; hosts and chips of the slice are unknown")
            return found
        grid = {"topology": shape.topology} if shape.topology else {}
        return {**grid, **found, "slice_chips": shape.chips, "slice_hosts": shape.hosts}
