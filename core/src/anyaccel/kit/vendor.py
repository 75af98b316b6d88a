"""The base class of vendors: attributes describe a vendor, methods have the usual behavior as default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from anyaccel.hookspecs import HOOKS
from anyaccel.kit.caps import GROWTH, Cap, cap_frameworks
from anyaccel.kit.card import UNIFIED, Card
from anyaccel.kit.catalog import Catalog, Entry, pci_name, tag
from anyaccel.kit.fault import Fault, FaultError, fail, warn
from anyaccel.kit.files import Holders, host_memory, physical_function, text
from anyaccel.kit.masks import Mask
from anyaccel.kit.tools import Measures, Row, Tool
from anyaccel.plugin import (
    ContainerEdits,
    Detected,
    Device,
    DeviceProcess,
    EnvContext,
    EnvEdits,
    Finding,
    Fractional,
    Health,
    Mount,
    PciFunction,
    PluginInfo,
    ProbeContext,
    Product,
    Stats,
    Term,
    VisiblePart,
    hookimpl,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OTHER_USES = ("vfio", "pci-stub", "uio_pci_generic")
"""Parts of the names of drivers that reserve a PCI function for a virtual machine or a user-space driver."""


class Vendor:
    """A plug-in. The entry point names an instance of a subclass: ``acme = "anyaccel_acme:plugin"``.

    A subclass sets attributes and overrides methods that differ for the vendor. A method with the name of a hook, such
    as ``detect``, is that hook.

    Attributes:
        key: Key of the vendor, equal to the name of the entry point.
        resource: Resource name of the devices in requests: ``GPU``, ``NPU`` ...
        kind: Kind of accelerator, in lower case: ``gpu``, ``npu`` ...
        brand: Name of the vendor or product line in messages, as in ``no Acme device is on the PCI bus``.
        url: The vendor's documentation on choosing devices.
        runtimes: Beginnings of the file names of the runtime libraries; see :class:`anyaccel.plugin.PluginInfo`.
        driver: Name of the kernel driver, as module and as PCI driver. Empty if the name of the PCI driver is not
            published: then any driver counts, except drivers that reserve a function for another use.
        modules: Names of the kernel modules, if they differ from ``driver``. A PCI driver may have one of these names.
        pci_vendors: PCI vendor ids, the usual one first.
        pci_classes: Base class and subclass (16 bits) of its functions; empty for any.
        pci_known: Whether only PCI device ids in the catalog count, because unrelated devices have the vendor's id.
        virtual_functions: Whether virtual functions count on a host that shows their physical function. Inside a
            virtual machine they always count.
        catalog: The vendor's products.
        entry_attribute: Attribute of a device that holds the key of its entry in the catalog.
        mask: The variable by which a process sees certain devices; None if the vendor's software has no such variable.
            Then each launch names the vendor, whose devices are open to every worker that is not confined.
        masked_software: The software that obeys the mask, if not all of the vendor's does: ``the old runtime``. Each
            launch warns that the devices are open to other software.
        alike: Further variables that are set to the value of the mask, because some software reads them instead.
        variables: Further variables that the plug-in sets or unsets.
        borrowed: Variables among all of these that belong to another vendor and that the runtime obeys. No worker gets
            devices of both vendors.
        caps: Memory limits of frameworks. A worker with a share of one device gets them, by :func:`cap_frameworks`.
        cleared: Other vendors' variables that the runtime ignores and the plug-in only unsets.
        sharing: Whether several holders may share a device.
        exclusive: A clause that says why a device can have only one holder, if ``sharing`` is ``Fractional.NO``.
        counts: Numbers of devices that one job may use; empty for any number.
        ray_switch: The switch that keeps Ray from writing the mask, if its name does not follow from the mask; see
            :class:`~anyaccel.plugin.PluginInfo`.
        number_name: Name of the number that the mask takes, if it is a fact of the machine and not a position:
            ``module id``. A device whose number is unknown or not unique is listed and cannot be given out.
        numbers_restart: Whether the numbers restart in each parent, such as a partition. Then they are unique per
            parent, and the mask must name both; the index is the position, the number is the attribute ``number``.
        number_remedy: Remedy if that number is unknown.
        nameless: Attribute that marks a device without a name in the mask; such a card must also be blamed.
        state_file: File of a card in which the driver reports the card's state; empty if there is no such file. The
            catalog's table ``[states]`` lists every state of the driver.
        unreadable: Remedy for a file of a card that exists and cannot be read; :attr:`log_hint` if empty.
        registered: Whether a card is at fault if its driver made no device node.
        node_missing: Remedy for a missing device node, beside passing the node to a container.
        node_closed: Remedy for a device node that this user may not open.
        held: Which device nodes only the holder keeps open: ``first`` (the rest are for monitoring), ``every``, or
            ``none`` if unknown.
        control_nodes: Device nodes that every user of a device needs beside the device's own nodes.
        host_paths: Directories and files of the host that a container needs, each behind the attribute of a device in
            which detection stores the path if it exists.
        tool: The vendor's command that :meth:`measure` asks, or None.
    """

    key: str = ""
    resource: str = ""
    kind: str = ""
    brand: str = ""
    url: str = ""
    runtimes: Sequence[str] = ()
    driver: str = ""
    modules: Sequence[str] = ()
    pci_vendors: Sequence[int] = ()
    pci_classes: Sequence[int] = ()
    pci_known: bool = False
    virtual_functions: bool = True
    catalog: Catalog
    entry_attribute: str = ""
    mask: Mask | None
    masked_software: str = ""
    alike: Sequence[str] = ()
    variables: Sequence[str] = ()
    borrowed: Sequence[str] = ()
    caps: Sequence[Cap] = ()
    cleared: Sequence[str] = ()
    sharing: Fractional = Fractional.NO
    exclusive: str = ""
    counts: Sequence[int] = ()
    ray_switch: str = ""
    number_name: str = ""
    numbers_restart: bool = False
    number_remedy: str = ""
    nameless: str = "nameless"
    state_file: str = ""
    unreadable: str = ""
    registered: bool = True
    node_missing: str = ""
    node_closed: str = ""
    held: Literal["first", "every", "none"] = "first"
    control_nodes: Sequence[str] = ()
    host_paths: Sequence[tuple[str, str]] = ()
    tool: Tool | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Make each method with the name of a hook the hook: ``detect`` is ``anyaccel_detect``.

        Left out are :meth:`validate`, unless the class overrides it or :meth:`maskable`, and :meth:`handover`, unless
        the class overrides it: a missing hook costs no call.
        """
        super().__init_subclass__(**options)
        absent = {
            # The core checks counts and exclusive devices itself.
            "anyaccel_validate": cls.validate is Vendor.validate
            and cls.maskable is Vendor.maskable
            and not getattr(getattr(cls, "mask", None), "set_attribute", ""),
            "anyaccel_handover": cls.handover is Vendor.handover,
        }
        for name in HOOKS:
            # An alias, so that the plug-in manager finds the names of the method's own arguments.
            # A hook for which the kit has nothing to say, is in the plug-ins that have a method of its name.
            method = getattr(cls, name.removeprefix("anyaccel_"), None)
            setattr(cls, name, None if absent.get(name) or method is None else hookimpl(method))

    # Who the vendor is.

    def info(self) -> PluginInfo:
        """Return the plug-in's identity."""
        return PluginInfo(
            vendor=self.key,
            resource=self.resource,
            kind=self.kind,
            env_vars=(*self._mask_variables, *self.variables, *self._cap_variables),
            borrowed=tuple(self.borrowed),
            cleared=tuple(self.cleared),
            url=self.url,
            runtimes=tuple(self.runtimes),
            counts=tuple(self.counts),
            exclusive=self.exclusive,
            control_nodes=tuple(self.control_nodes),
            maskable=self.mask is not None,
            masked_software=self.masked_software,
            ray_switch=self.ray_switch,
        )

    def products(self) -> Sequence[Product]:
        """Return the products for simulation, as the catalog lists them."""
        return self.catalog.products()

    def entry(self, device: Device) -> Entry | None:
        """Return the product of a detected or simulated device, or None."""
        key = device.attributes.get(self.entry_attribute)
        return (self.catalog.get(key) if key is not None else None) or self.catalog.by_name(device.model)

    def tags(self, device: Device) -> Sequence[str]:
        """Return the accelerator types of a device: the tags of its product, then the model."""
        entry = self.entry(device)
        return tuple(dict.fromkeys((*(entry.tags if entry else ()), tag(device.model) or self.resource)))

    def fractional(self, device: Device) -> Fractional:
        """Return how several holders may share a device."""
        return self.sharing

    # What is on the machine.

    @property
    def log_hint(self) -> str:
        """A remedy: where to look for the driver's messages."""
        name = self.driver or next(iter(self.modules), "")
        return f"look for {name} in 'dmesg'" if name else "look in 'dmesg'"

    def functions(self, ctx: ProbeContext) -> list[PciFunction]:
        """Return the PCI functions that may be devices of this vendor."""
        # With several vendor ids and a class, one pass over the bus filters by class; without a class, reading every
        # function in full costs more than one pass per vendor.
        vendors = [None] if len(self.pci_vendors) > 1 and self.pci_classes else self.pci_vendors
        found = [function for vendor in vendors for function in ctx.pci(vendor, self.pci_classes)]
        return [
            function
            for function in found
            if function.vendor in self.pci_vendors
            and (not self.pci_known or self.catalog.knows(function.device))
            and (self.virtual_functions or physical_function(ctx, function.address) is None)
        ]

    def present(self, ctx: ProbeContext) -> bool:
        """Return True if the vendor's driver is loaded, on a machine without any of its devices."""
        return any(ctx.exists(f"/sys/module/{module}") for module in self._loaded_as())

    def driver_version(self, ctx: ProbeContext) -> str:
        """Return the version of the kernel driver; empty if unknown."""
        versions = (text(ctx, f"/sys/module/{module}/version") for module in self._loaded_as())
        return next(filter(None, versions), "")

    def _loaded_as(self) -> Sequence[str]:
        return self.modules or ((self.driver,) if self.driver else ())

    def detect(self, ctx: ProbeContext) -> Detected | None:
        """Return the devices of a machine; None if the vendor is not on the machine."""
        cards = self.survey(ctx)
        notes = list(self.notes(ctx))
        if not cards and not notes:
            return Detected(driver_version=self.driver_version(ctx)) if self.present(ctx) else None
        try:
            # complete() comes before identify(): a tool may report the product or the memory that identifies a card.
            notes.extend(self.complete(ctx, cards))
        except FaultError as error:
            notes.append(str(error))
        for card in cards:
            self.identify(card)
        self.arrange(cards)
        if self.mask and (key := self.mask.set_attribute):
            self._check_sets(cards, key)
        self.connect(ctx, cards)
        return inventory(cards, self.driver_version(ctx), notes)

    def _check_sets(self, cards: Sequence[Card], key: str) -> None:
        """Record the size of each set of the mask; blame cards without a set, and cards beside a broken one."""
        sizes = Counter(card.attributes.get(key) for card in cards)
        broken = {card.attributes.get(key): card.id for card in cards if card.fault}
        for card in cards:
            name = card.attributes.get(key)
            card.attributes["set_size"] = None if name is None else sizes[name]
            if card.fault or (name is not None and name not in broken):
                continue
            # A process gets whole sets, so no process could ever get this device.
            if name is None:
                card.blame(f"its {key} is unknown, so the mask cannot name it", self.log_hint)
            else:
                reason = f"the mask names it together with {broken[name]}, which cannot be used"
                card.blame(reason, f"repair {broken[name]}")
            card.attributes[self.nameless] = True

    def notes(self, ctx: ProbeContext) -> Iterable[str]:
        """Yield notes for the user beside the devices; by default, the PCI functions that are ignored."""
        ignored = self.catalog.ignored if self.pci_vendors else {}
        functions = self.functions(ctx) if ignored else []
        return [
            f"{ignored[function.device]} at {function.address} is no {self.resource} and left out"
            for function in functions
            if function.device in ignored
        ]

    def survey(self, ctx: ProbeContext) -> list[Card]:
        """Read the files of every device. Runs in :meth:`detect`, and again in :meth:`stats`."""
        functions = self.functions(ctx)
        return [self.card(ctx, function) for function in functions if function.device not in self.catalog.ignored]

    def card(self, ctx: ProbeContext, function: PciFunction) -> Card:
        """Build the card of one PCI function."""
        card = Card(
            ctx,
            f"{self.key}-{function.address}",
            function,
            unreadable=self.unreadable or self.log_hint,
        )
        # A further file per function, so it is read only if a product of this id asks for it.
        revision = card.revision if self.catalog.has_revisions(function.device) else None
        card.entry = self.catalog.by_pci(function.device, revision=revision, subsystem=function.subsystem_device)
        if self.bound(card):
            card.attributes |= {name: path for name, path in self.host_paths if ctx.exists(path)}
            self.read_card(card)
            self.check_state(card)
            self.check_nodes(card)
        return card

    def bound(self, card: Card) -> bool:
        """Return True if the vendor's driver is bound to a card; otherwise blame the card."""
        driver = card.function.driver if card.function else None
        if self._drives(driver):
            return True
        if driver is None:
            load = "".join(f" and run 'modprobe {module}'" for module in self._loaded_as()[:1])
            card.blame("no driver is bound to it", f"install the {self.driver or self.brand} driver{load}")
        else:
            reason = f"it is bound to the driver {driver!r}, which keeps it for another use"
            card.blame(reason, f"bind it to {self.driver or f'the {self.brand} driver'}")
        return False

    def _drives(self, driver: str | None) -> bool:
        """Return True if a driver is the vendor's, as far as the driver's name is published."""
        if self.driver:
            return driver in (self.driver, *self.modules)
        return driver is not None and not any(use in driver for use in OTHER_USES)

    def read_card(self, card: Card) -> None:
        """Read the driver's files of a bound card: nodes, number, folders, and facts of this vendor."""

    def check_state(self, card: Card) -> None:
        """Blame a card in a bad state, by the driver's own report; a good state makes the card sound."""
        state = card.read(self.state_file) if self.state_file else None
        if state is None:
            return
        unknown = "this is no state that the driver's documentation knows: look in 'dmesg'"
        remedy = self.catalog.data["states"].get(state.lower(), unknown)
        if remedy:
            card.blame(f"the driver reports {state!r}", remedy)
        card.sound = True

    def check_nodes(self, card: Card) -> None:
        """Blame a card whose first device node is missing or may not be opened; keep the further nodes that exist."""
        if not card.nodes:
            if self.registered:
                card.blame("the driver has not registered it", f"{self.log_hint}, then reload the driver")
            return
        card.check_node(card.nodes[0], missing=self.node_missing, closed=self.node_closed)
        # Drivers of other versions make other further nodes, so a missing one is not a fault.
        card.nodes = (card.nodes[0], *filter(card.ctx.exists, card.nodes[1:]))

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Add facts that the files lack, with the vendor's tool or library.

        Returns:
            Notes on failures.

        Raises:
            FaultError: The tool cannot be understood. The error becomes a note, and facts that were added stay.
        """
        return ()

    def is_complete(self, cards: Sequence[Card]) -> bool:
        """Return True if the vendor's tool has nothing to add: each card has a fault, or a number and a product.

        A card without siblings gets the number 0.
        """
        if len(cards) == 1:
            cards[0].number = 0
        return all(card.fault or (card.entry and card.number is not None) for card in cards)

    def match_rows(self, cards: Iterable[Card], rows: Mapping[str, Row]) -> Iterator[tuple[Card, Row]]:
        """Yield the cards that the tool shows, with their rows, by PCI address; blame the other cards."""
        for card in cards:
            if (row := rows.get(card.address or "")) is not None:
                yield card, row
            elif self.tool:
                card.blame(f"{self.tool.name} does not show it", f"{self.log_hint}, then restart the machine")

    def identify(self, card: Card) -> None:
        """Find the product of a card, by PCI id, name or memory, and copy the facts of the catalog."""
        card.model = card.model or (card.entry.model if card.entry else self.unknown_model(card))
        # A name that the driver or tool reports is more exact than memory, which several products may have.
        entry = card.entry or self.catalog.by_name(card.model) or self.catalog.by_memory(card.memory_bytes)
        card.entry = entry
        if entry is not None:
            card.memory_bytes = card.memory_bytes or entry.memory_bytes
            card.attributes = {**entry.attributes, **card.attributes}

    def unknown_model(self, card: Card) -> str:
        """Return a name for a card of unknown PCI id.

        The catalog's ``pci_names`` come first, then the machine's ``pci.ids``, then brand and id.
        """
        if card.function is None:
            return self.brand
        vendor, device = card.function.vendor, card.function.device
        revision = card.revision if self.catalog.has_revisions(device) else None
        name = self.catalog.pci_name(device, revision) or pci_name(card.ctx, vendor, device)
        return name or f"{self.brand}-{device:04x}"

    def arrange(self, cards: list[Card]) -> None:
        """Sort the cards into the runtime's order and number them: by the number in the mask, else by position."""
        if self.number_name:
            self._check_numbers(cards)
            cards.sort(key=lambda card: (card.number is None, self._numbered_in(card) or "", card.number or 0, card.id))
        for index, card in enumerate(cards):
            card.index = index
        if self.numbers_restart:
            for card in cards:
                card.attributes["number"] = card.number
        elif self.number_name:
            numbers = [card.number for card in cards if card.number is not None]
            # Cards without a number get free indexes as labels, above every number that the machine could have.
            above = max([0, *self.counts, *(number + 1 for number in numbers)]) - len(numbers)
            for card in cards:
                card.index = above + card.index if card.number is None else card.number

    def _numbered_in(self, card: Card) -> str | None:
        """Return the part of the machine in which a card's number is unique; None for the whole machine."""
        return card.parent if self.numbers_restart else None

    def _check_numbers(self, cards: Sequence[Card]) -> None:
        """Blame the cards with an unknown number or that of another card, and mark them as nameless."""
        holders = Counter((self._numbered_in(card), card.number) for card in cards)
        for card in cards:
            same = holders[self._numbered_in(card), card.number]
            if card.number is not None and same == 1:
                continue
            fact = "is unknown" if card.number is None else f"{card.number} is that of {same} devices"
            # Without a driver the number is not missing: nothing could have reported it.
            bound = card.function is None or self._drives(card.function.driver)
            reason = f"its {self.number_name} {fact}, so no process can be confined to it"
            card.blame(reason, self.number_remedy, partial=bound)
            card.number = None
            card.attributes[self.nameless] = True

    def connect(self, ctx: ProbeContext, cards: Sequence[Card]) -> None:
        """Add links between the cards; by default, cards that share a :meth:`board` are linked to each other."""
        for card in cards:
            own = self.board(card)
            if own is not None:
                card.links = {other.id: 1 for other in cards if other is not card and self.board(other) == own}

    def board(self, card: Card) -> object:
        """Return a value shared by the cards of a board alone, such as a serial number; None if links are unknown."""
        return None

    # What a process is told.

    def maskable(self, device: Device) -> bool:
        """Return True if a mask can name a device."""
        return not device.attributes.get(self.nameless)

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Return the reason why one job cannot use exactly these devices, or None.

        By default, the rules of :attr:`counts` and :attr:`exclusive`, which the core knows already, and that each
        device must have a name in the mask. So there is no hook, and no call, unless a subclass overrides this method
        or :meth:`maskable`.
        """
        reason = self.info().refusal(request, devices) or self._split_set(devices)
        nameless = next((device for device in devices if not self.maskable(device)), None)
        return reason or (None if nameless is None else str(self._unmaskable(nameless)))

    def _split_set(self, devices: Sequence[Device]) -> str | None:
        """Return the reason why devices are not whole sets of the mask, or None."""
        key = self.mask.set_attribute if self.mask else ""
        counts = Counter(device.attributes.get(key) for device in devices)
        for device in devices if key else ():
            name, size = (device.attributes.get(each) for each in (key, "set_size"))
            if isinstance(size, int) and counts[name] != size:
                return f"{device.id} is one of {size} devices that the mask names as {name}; ask for all {size} of them"
        return None

    def _unmaskable(self, device: Device) -> Fault:
        why = device.health_reason or f"its {self.number_name or 'number'} is unknown"
        return Fault(f"{device.id} cannot be given to a process: {why}", device.health_remedy or self.number_remedy)

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Set variables so that a worker sees exactly these devices.

        The mask and the variables that are :attr:`alike` get the value; the ones that are :attr:`cleared` are unset.

        Raises:
            FaultError: The mask cannot name a device, or a device is listed twice.
        """
        values = dict.fromkeys(self._mask_variables, self.write_mask(devices)) if self._mask_variables else {}
        return cap_frameworks(self.caps, EnvEdits(set=values, unset=frozenset(self.cleared)), devices, ctx)

    @property
    def _cap_variables(self) -> tuple[str, ...]:
        """The variables to limit frameworks with."""
        return (GROWTH, *(name for cap in self.caps for name in cap.variables)) if self.caps else ()

    @property
    def _mask_variables(self) -> tuple[str, ...]:
        """The variables to set to the mask's value."""
        return (self.mask.variable, *self.alike) if self.mask else ()

    def write_mask(self, devices: Sequence[Device], mask: Mask | None = None) -> str:
        """Return the value of the mask, or of another mask, for some devices.

        Raises:
            FaultError: The mask cannot name a device, or a device is listed twice.
        """
        nameless = next((device for device in devices if not self.maskable(device)), None)
        if nameless is not None:
            raise FaultError(*self._unmaskable(nameless))
        mask = mask or self.mask
        return mask.write(devices) if mask else ""

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str | VisiblePart] | None:
        """Return the devices, or slots of devices, visible in an environment; None if nothing is hidden.

        Raises:
            FaultError: The runtime would refuse the value.
        """
        return self.read_mask(environ, devices)

    def read_mask(
        self, environ: Mapping[str, str], devices: Sequence[Device], mask: Mask | None = None
    ) -> list[str] | None:
        """Return the ids of the devices visible through the mask, or another mask; None if nothing is hidden.

        Raises:
            FaultError: The runtime would refuse the value.
        """
        mask = mask or self.mask
        seen = mask.read(environ, [device for device in devices if self.maskable(device)]) if mask else None
        return None if seen is None else [device.id for device in seen]

    def container(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return the nodes, mounts and variables of a container for exactly these devices."""
        return ContainerEdits(
            nodes=tuple(dict.fromkeys((*self.shared_nodes(devices), *(n for d in devices for n in d.nodes)))),
            mounts=tuple(self.mounts(devices)),
            env=self.container_env(devices),
        )

    def shared_nodes(self, devices: Sequence[Device]) -> Iterable[str]:
        """Return device nodes that a container needs beside the devices' own; by default, the control nodes."""
        return self.control_nodes if devices else ()

    def mounts(self, devices: Sequence[Device]) -> Iterable[Mount]:
        """Return files and directories of the host for a container; by default, the existing :attr:`host_paths`."""
        there = {path for name, path in self.host_paths for device in devices if device.attributes.get(name)}
        return [Mount(source=path, target=path) for path in sorted(there)]

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return variables of a container, for the program or the container runtime."""
        return {}

    # How it is now.

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Measure memory, utilization, temperature and power, with the vendor's tool or library.

        Returns:
            Measurements by device id; None if the tool or library is not installed. The tool should have shown a device
            that has no entry.

        Raises:
            FaultError: The tool hangs, fails, or cannot be understood.
        """
        return None

    def measures_by_device(
        self, rows: Mapping[str, Row] | None, devices: Sequence[Device], *names: str
    ) -> dict[str, Measures] | None:
        """Convert a tool's rows by PCI address to the result of :meth:`measure`; None if the rows are None.

        Args:
            rows: The answer of the tool; None if the tool is not installed.
            devices: The devices.
            names: Arguments of :meth:`Row.measures`.

        Raises:
            FaultError: See :meth:`Row.measures`.
        """
        if rows is None:
            return None
        own = {device.id: rows.get(device.pci_bus_id or "") for device in devices}
        return {name: row.measures(*names) for name, row in own.items() if row is not None}

    def stats(self, devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
        """Observe devices now: measurements, the health that a new survey shows, and the holders.

        Raises:
            FaultError: See :meth:`measure`.
        """
        measured = self.complete_measures(ctx, devices, self.measure(ctx, devices) or {})
        processes = self.processes(ctx, devices)
        cards = {card.id: card for card in self.survey(ctx)}
        found = {}
        for device in devices:
            # The measurements above may take seconds; the survey is the newest fact and decides about health.
            health, fault = self.judge(device, cards.get(device.id))
            found[device.id] = Stats(
                **measured.get(device.id, {}),
                processes=processes.get(device.id),
                health=health,
                health_reason=fault.reason,
                health_remedy=fault.remedy,
            )
        return found

    def complete_measures(
        self, ctx: ProbeContext, devices: Sequence[Device], measured: Mapping[str, Measures]
    ) -> dict[str, Measures]:
        """Complete measurements by facts of several devices: memory in use of the host, and power of a common sensor.

        The power of a :meth:`power_group` stays with its first device, so that a sum over devices is right.
        """
        found = dict(measured)
        groups: set[object] = set()
        for device in sorted(devices, key=lambda device: device.index):
            group, own = self.power_group(device), found.get(device.id, Measures())
            if device.attributes.get(UNIFIED) and own.get("memory_used_bytes") is None:
                size, free = host_memory(ctx), host_memory(ctx, "MemAvailable")
                used = size - free if size is not None and free is not None else None
                found[device.id] = {**own, "memory_used_bytes": used}
            if group is not None and group in groups and device.id in found:
                found[device.id] = {**found[device.id], "power_watts": None}
            groups.add(group)
        return found

    def power_group(self, device: Device) -> object:
        """Return a value shared by devices behind a common power sensor, such as a board; None for a sensor each."""
        return None

    def judge(self, device: Device, card: Card | None) -> tuple[Health, Fault]:
        """Return the current health of a device; ``card`` is the device in a new survey, None if the device is gone."""
        if card is None:
            fault = Fault("it is gone from the PCI bus", f"{self.log_hint}, then restart the machine")
            return Health.UNHEALTHY, fault
        # arrange() did not run on the new survey, so a missing number is known from the detected device alone.
        if card.fault is None and not self.maskable(device):
            return Health.UNHEALTHY, Fault(device.health_reason, device.health_remedy)
        # complete() did not run on the new survey either, so a contradiction that it found still holds.
        if card.fault is None and device.health is Health.UNKNOWN and device.health_reason:
            return device.health, Fault(device.health_reason, device.health_remedy)
        return card.health, card.fault or Fault("")

    def processes(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, tuple[DeviceProcess, ...] | None]:
        """Return the processes with devices in use; by default, processes with one of :meth:`held_nodes` open.

        Returns:
            Processes by device id; None, or no entry, if there may be holders that cannot be seen.
        """
        holders = Holders(ctx, (node for device in devices for node in self.held_nodes(device)))
        return {device.id: holders.find(self.held_nodes(device)) for device in devices}

    def held_nodes(self, device: Device) -> Sequence[str]:
        """Return the nodes that only the holder of a device has open, as :attr:`held` says."""
        return {"first": device.nodes[:1], "every": device.nodes, "none": ()}[self.held]

    def diagnose(self, ctx: ProbeContext) -> Sequence[Finding]:
        """Return findings about this vendor on this machine.

        The core itself reports unhealthy devices, notes, and masks that hide every device.
        """
        detected = self.detect(ctx)
        if detected is None:
            return ()
        if not detected.devices and not detected.notes:
            where = f"'lspci -d {self.pci_vendors[0]:04x}:' and " if self.pci_vendors else ""
            reason = f"the {self.driver or self.brand} driver is loaded and no {self.brand} device is on the PCI bus"
            return (warn(reason, f"check {where}the seating of the boards"),)
        doubts = [device for device in detected.devices if device.health is Health.UNKNOWN and device.health_reason]
        return (
            *(
                warn(f"health of {device.id} is unknown: {device.health_reason}", device.health_remedy)
                for device in doubts
            ),
            *self.measuring_faults(ctx, detected.devices),
            *self.findings(ctx, detected),
        )

    def measuring_faults(self, ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
        """Yield findings on failures of :meth:`measure`."""
        if self.tool is None or not devices:
            return
        try:
            measured = self.measure(ctx, devices)
        except FaultError as error:
            # The tool's own error says more than a list of devices without measurements.
            yield fail(*error.fault)
            return
        if measured is None:
            reason = f"{self.tool.name} is not on the PATH, so memory in use, load, temperature and power are unknown"
            yield warn(reason, f"install {self.tool.package or self.tool.name}")
            return
        missing = [device.id for device in devices if device.id not in measured]
        if missing:
            reason = f"{self.tool.name} does not show {', '.join(missing)}, of {len(devices)} devices"
            yield fail(reason, f"match the versions of driver and tools, then {self.log_hint}")

    def findings(self, ctx: ProbeContext, detected: Detected) -> Iterable[Finding]:
        """Return further findings: conflicting variables, settings of the machine, errors in the kernel log."""
        return ()

    # What happens when devices are given and given back.

    def handover(self, devices: Sequence[Device], ctx: ProbeContext, given: bool) -> None:
        """Change devices for their holder (``given``), or put them into their idle state; raise on failure.

        A vendor without this method changes nothing. See ``anyaccel_handover`` for what each call must allow for.
        """


def inventory(cards: Sequence[Card], version: str, notes: Iterable[str] = (), *, partial: bool = False) -> Detected:
    """Build the inventory of a vendor from cards.

    Args:
        cards: The cards, in their order.
        version: Version of the driver; empty if unknown.
        notes: Notes for the user beside the devices.
        partial: Whether devices or facts are missing that no card reports as missing.
    """
    return Detected(
        devices=tuple(card.device() for card in cards),
        driver_version=version,
        partial=partial or any(card.partial for card in cards),
        notes=tuple(notes),
    )
