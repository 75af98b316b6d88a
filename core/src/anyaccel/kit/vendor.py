"""A vendor, declared as a class: its attributes say what it is, its methods what it does, with the usual as default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from anyaccel.kit.card import Card
from anyaccel.kit.catalog import Catalog, Entry, pci_name, tag
from anyaccel.kit.fault import Fault, FaultError, fail, warn
from anyaccel.kit.files import physical_function, text
from anyaccel.kit.masks import Mask
from anyaccel.kit.processes import Holders
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
"""What stands in the names of drivers that keep a PCI function for a virtual machine or a program of its own."""


class Vendor:
    """A plug-in. An instance of a subclass is what the entry point names: ``acme = "anyaccel_acme:plugin"``.

    A subclass sets attributes, and overrides the methods below where its vendor does something else. The hooks
    themselves, ``anyaccel_*``, are never overridden: each calls the method of its name.

    Attributes:
        key: Key of the vendor, equal to the name of the entry point.
        resource: Name under which schedulers count its devices: ``GPU``, ``NPU`` ...
        kind: Kind of accelerator in lower case.
        brand: Name of the vendor or product line for people, as in ``no Acme device is on the PCI bus``.
        url: Where people find the vendor's documentation on choosing devices.
        runtimes: How the file names of its runtime libraries begin; see :class:`anyaccel.plugin.PluginInfo`.
        driver: Name of the kernel driver, as module and as PCI driver. Empty where nobody publishes what the latter is:
            then every driver counts but those that keep a function for another use.
        modules: Names of the kernel modules, where it is not the driver's alone; a PCI driver may have one of them.
        pci_vendors: PCI vendor ids, the usual one first.
        pci_classes: Base class and subclass (16 bits) of its functions; empty for any.
        pci_known: Whether only PCI device ids that the catalog knows count, since other things have the vendor's id.
        virtual_functions: Whether virtual functions count where the host shows whose they are. Inside a virtual machine
            they are cards.
        catalog: Its products.
        entry_attribute: Attribute of a device that holds the key of its entry in the catalog.
        mask: The variable by which a process sees certain devices; None where the vendor's software has none. Then
            each launch names the vendor, whose devices are open to all workers that are not confined.
        alike: Variables that are always set to what the mask is, since some software looks at them instead.
        variables: Further variables that the plug-in sets or unsets.
        borrowed: Those of all its variables that are another vendor's and that the runtime obeys; no worker gets
            devices of both.
        cleared: Those that are another vendor's, that the runtime does not obey and the plug-in only unsets.
        sharing: Whether several holders may share a device.
        exclusive: Why a device has one holder only, in a clause, where ``sharing`` is ``Fractional.NO``.
        counts: Numbers of devices that one job may use; empty for any.
        ray_switch: What keeps Ray from writing the mask, where Ray calls it otherwise than the mask; see
            :class:`~anyaccel.plugin.PluginInfo`.
        number_name: What the mask takes where that is no position but a number that the machine must tell: ``module
            id``. A device without it, or that shares it, is listed and cannot be given out.
        number_remedy: What to do when that number is unknown.
        nameless: Attribute that marks a device which no mask can name; such a card is to be blamed, too.
        state_file: File of a card in which the driver says how it is; empty where there is none. The catalog's
            ``[states]`` have every state that the driver knows.
        unreadable: What to do when a file of a card is there and cannot be read; :attr:`log_hint` when empty.
        registered: Whether a card whose driver made no device node is at fault.
        node_missing: What to do, beside passing it to a container, when a device node is not there.
        node_closed: What to do when a device node may not be opened.
        held: Which of its nodes only the holder of a device has open: the ``first``, where others are for monitors,
            ``every`` one, or ``none`` that is known.
        control_nodes: Device nodes that every user of a device needs beside its own.
        host_paths: Directories and files of the host that a container needs, each behind the attribute of a device that
            holds it where it exists.
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
    alike: Sequence[str] = ()
    variables: Sequence[str] = ()
    borrowed: Sequence[str] = ()
    cleared: Sequence[str] = ()
    sharing: Fractional = Fractional.NO
    exclusive: str = ""
    counts: Sequence[int] = ()
    ray_switch: str = ""
    number_name: str = ""
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
        """Leave the hook out whose default says nothing that the core does not know of a usable device."""
        super().__init_subclass__(**options)
        asked = cls.validate is not Vendor.validate or cls.maskable is not Vendor.maskable
        cls.anyaccel_validate = Vendor.anyaccel_validate if asked else None  # type: ignore[method-assign,assignment]

    # Who the vendor is.

    def info(self) -> PluginInfo:
        """Say who we are."""
        return PluginInfo(
            vendor=self.key,
            resource=self.resource,
            kind=self.kind,
            env_vars=(*self._written, *self.variables),
            borrowed=tuple(self.borrowed),
            cleared=tuple(self.cleared),
            url=self.url,
            runtimes=tuple(self.runtimes),
            counts=tuple(self.counts),
            exclusive=self.exclusive,
            control_nodes=tuple(self.control_nodes),
            maskable=self.mask is not None,
            ray_switch=self.ray_switch,
        )

    def products(self) -> Sequence[Product]:
        """List the products that are known without hardware."""
        return self.catalog.products()

    def entry(self, device: Device) -> Entry | None:
        """Find the product that a detected or simulated device is."""
        key = device.attributes.get(self.entry_attribute)
        return (self.catalog.get(key) if key is not None else None) or self.catalog.by_name(device.model)

    def tags(self, device: Device) -> Sequence[str]:
        """Name the accelerator types of a device: those of its product, then its model."""
        entry = self.entry(device)
        return tuple(dict.fromkeys((*(entry.tags if entry else ()), tag(device.model) or self.resource)))

    def fractional(self, device: Device) -> Fractional:
        """Say whether several holders may share a device."""
        return self.sharing

    # What is on the machine.

    @property
    def log_hint(self) -> str:
        """Where people look for what the driver has to say."""
        name = self.driver or next(iter(self.modules), "")
        return f"look for {name} in 'dmesg'" if name else "look in 'dmesg'"

    def functions(self, ctx: ProbeContext) -> list[PciFunction]:
        """List the PCI functions that may be devices of this vendor."""
        # One look at the bus, whose every function is read; where classes tell nothing, only ours are read whole.
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
        """Whether the vendor's driver is on a machine that shows none of its devices."""
        return any(ctx.exists(f"/sys/module/{module}") for module in self._loaded_as())

    def driver_version(self, ctx: ProbeContext) -> str:
        """Version of the kernel driver; empty when unknown."""
        versions = (text(ctx, f"/sys/module/{module}/version") for module in self._loaded_as())
        return next(filter(None, versions), "")

    def _loaded_as(self) -> Sequence[str]:
        return self.modules or ((self.driver,) if self.driver else ())

    def detect(self, ctx: ProbeContext) -> Detected | None:
        """Find the devices of a machine; None when this vendor is not on it."""
        cards = self.survey(ctx)
        notes = list(self.notes(ctx))
        if not cards and not notes:
            return Detected(driver_version=self.driver_version(ctx)) if self.present(ctx) else None
        try:
            notes.extend(self.complete(ctx, cards))
        except FaultError as error:
            notes.append(str(error))
        for card in cards:
            self.identify(card)
        self.arrange(cards)
        self.connect(ctx, cards)
        return inventory(cards, self.driver_version(ctx), notes)

    def notes(self, ctx: ProbeContext) -> Iterable[str]:
        """Say what people should know beside the devices: by default, which functions are no devices of ours."""
        ignored = self.catalog.ignored if self.pci_vendors else {}
        functions = self.functions(ctx) if ignored else []
        return [
            f"{ignored[function.device]} at {function.address} is no {self.resource} and left out"
            for function in functions
            if function.device in ignored
        ]

    def survey(self, ctx: ProbeContext) -> list[Card]:
        """Look at every device by files alone: in :meth:`detect`, and again in :meth:`stats`."""
        functions = self.functions(ctx)
        ignored: Collection[int] = self.catalog.ignored if functions else ()
        return [self.card(ctx, function) for function in functions if function.device not in ignored]

    def card(self, ctx: ProbeContext, function: PciFunction) -> Card:
        """Look at one PCI function."""
        card = Card(
            ctx,
            f"{self.key}-{function.address}",
            function,
            entry=self.catalog.by_pci(function.device, subsystem=function.subsystem_device),
            unreadable=self.unreadable or self.log_hint,
        )
        if self.bound(card):
            card.attributes |= {name: path for name, path in self.host_paths if ctx.exists(path)}
            self.look(card)
            self.check_state(card)
            self.check_nodes(card)
        return card

    def bound(self, card: Card) -> bool:
        """Whether the vendor's driver has a card; where it does not, that is its fault."""
        driver = card.function.driver if card.function else None
        if self._drives(driver):
            return True
        if driver is None:
            load = "".join(f" and run 'modprobe {module}'" for module in self._loaded_as()[:1])
            card.blame("no driver is bound to it", f"install the {self._driver_name} driver{load}")
        else:
            reason = f"it is bound to the driver {driver!r}, which keeps it for another use"
            card.blame(reason, f"bind it to {self.driver or f'the {self.brand} driver'}")
        return False

    def _drives(self, driver: str | None) -> bool:
        """Whether a driver is the vendor's, as far as its name is known."""
        if self.driver:
            return driver in (self.driver, *self.modules)
        return driver is not None and not any(use in driver for use in OTHER_USES)

    @property
    def _driver_name(self) -> str:
        return self.driver or self.brand

    def look(self, card: Card) -> None:
        """Look at what the driver shows of a card that it has: nodes, number, folders, what is the vendor's own."""

    def check_state(self, card: Card) -> None:
        """Read the state that the driver tells, and blame a card that is in another one than a good one."""
        state = card.read(self.state_file) if self.state_file else None
        if state is None:
            return
        unknown = "this is no state that the driver's documentation knows: look in 'dmesg'"
        remedy = self.catalog.data["states"].get(state.lower(), unknown)
        if remedy:
            card.blame(f"the driver reports {state!r}", remedy)
        card.sound = True

    def check_nodes(self, card: Card) -> None:
        """Blame a card whose first device node is not there or may not be opened; list the others that exist."""
        if not card.nodes:
            if self.registered:
                card.blame("the driver has not registered it", f"{self.log_hint}, then reload the driver")
            return
        card.check_node(card.nodes[0], missing=self.node_missing, closed=self.node_closed)
        card.nodes = (card.nodes[0], *filter(card.ctx.exists, card.nodes[1:]))

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Fill in what files left open, with the vendor's tool or library.

        Returns:
            Notes on what went wrong.

        Raises:
            FaultError: When the tool cannot be understood. It becomes a note, and what was filled in stays.
        """
        return ()

    def settled(self, cards: Sequence[Card]) -> bool:
        """Whether nothing is left to ask a tool that numbers the devices: each has a fault, or a number and a product.

        A card that is alone gets the number 0.
        """
        if len(cards) == 1:
            cards[0].number = 0
        return all(card.fault or (card.entry and card.number is not None) for card in cards)

    def shown(self, cards: Iterable[Card], rows: Mapping[str, Row]) -> Iterator[tuple[Card, Row]]:
        """The cards that the tool shows, each with its row, by PCI address. The others are blamed."""
        for card in cards:
            if (row := rows.get(card.address or "")) is not None:
                yield card, row
            elif self.tool:
                card.blame(f"{self.tool.name} does not show it", f"{self.log_hint}, then restart the machine")

    def identify(self, card: Card) -> None:
        """Settle which product a card is, by PCI id, name or memory, and take over what the catalog knows of it."""
        card.model = card.model or (card.entry.model if card.entry else self.unknown_model(card))
        entry = card.entry or self.catalog.by_name(card.model) or self.catalog.by_memory(card.memory_bytes)
        card.entry = entry
        if entry is not None:
            card.memory_bytes = card.memory_bytes or entry.memory_bytes
            card.attributes = {**entry.attributes, **card.attributes}

    def unknown_model(self, card: Card) -> str:
        """Name a card that no product's PCI id fits: by the catalog's names, the machine's list, or the id itself."""
        if card.function is None:
            return self.brand
        vendor, device = card.function.vendor, card.function.device
        return self.catalog.pci_name(device) or pci_name(card.ctx, vendor, device) or f"{self.brand}-{device:04x}"

    def arrange(self, cards: list[Card]) -> None:
        """Put the cards into the runtime's order and number them: by what the mask takes, else as they are."""
        if not self.number_name:
            for index, card in enumerate(cards):
                card.index = index
            return
        holders = Counter(card.number for card in cards)
        for card in cards:
            if card.number is None or holders[card.number] > 1:
                self._without_number(card, holders[card.number])
        cards.sort(key=lambda card: (card.number is None, card.number or 0, card.id))
        free = max([0, *self.counts, *(card.number + 1 for card in cards if card.number is not None)])
        nameless = (card for card in cards if card.number is None)
        for index, card in enumerate(nameless, free):  # a mere label, that no other device has
            card.index = index
        for card in cards:
            card.index = card.index if card.number is None else card.number

    def _without_number(self, card: Card, holders: int) -> None:
        fact = f"its {self.number_name} is unknown"
        if card.number is not None:
            fact = f"its {self.number_name} {card.number} is that of {holders} devices"
        bound = card.function is None or self._drives(card.function.driver)
        card.blame(f"{fact}, so no process can be confined to it", self.number_remedy, partial=bound)
        card.number = None
        card.attributes[self.nameless] = True

    def connect(self, ctx: ProbeContext, cards: Sequence[Card]) -> None:
        """Fill in the links of the cards: by default those that share a :meth:`board` are linked to each other."""
        for card in cards:
            own = self.board(card)
            if own is not None:
                card.links = {other.id: 1 for other in cards if other is not card and self.board(other) == own}

    def board(self, card: Card) -> object:
        """What the cards of a board have alike, such as its serial number; None where nothing is known of links."""
        return None

    # What a process is told.

    def maskable(self, device: Device) -> bool:
        """Whether a mask can name a device."""
        return not device.attributes.get(self.nameless)

    def validate(self, term: Term, devices: Sequence[Device]) -> str | None:
        """Say why one job cannot use exactly these devices; None when it can.

        The default is what :attr:`counts` and :attr:`exclusive` say, which the core knows already, and that a device
        must have a name. So there is no hook, and no call, unless a subclass overrides this method or :meth:`maskable`.
        """
        reason = self.info().refusal(term, devices)
        nameless = next((device for device in devices if not self.maskable(device)), None)
        return reason or (None if nameless is None else str(self._unmaskable(nameless)))

    def _unmaskable(self, device: Device) -> Fault:
        why = device.health_reason or f"its {self.number_name or 'number'} is unknown"
        return Fault(f"{device.id} cannot be given to a process: {why}", device.health_remedy or self.number_remedy)

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Make a worker see exactly these devices: the mask and what is :attr:`alike`, without what is :attr:`cleared`.

        Raises:
            FaultError: When the mask cannot name a device, or one is given twice.
        """
        values = dict.fromkeys(self._written, self.written(devices)) if self._written else {}
        return EnvEdits(set=values, unset=frozenset(self.cleared))

    @property
    def _written(self) -> tuple[str, ...]:
        """The variables that hold the mask's value."""
        return (self.mask.variable, *self.alike) if self.mask else ()

    def written(self, devices: Sequence[Device], mask: Mask | None = None) -> str:
        """Write a value of the mask, or of another one.

        Raises:
            FaultError: When it cannot name a device, or one is given twice.
        """
        nameless = next((device for device in devices if not self.maskable(device)), None)
        if nameless is not None:
            raise FaultError(*self._unmaskable(nameless))
        mask = mask or self.mask
        return mask.write(devices) if mask else ""

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str | VisiblePart] | None:
        """Say which devices an environment leaves visible, or which slots of them; None when it hides none.

        Raises:
            FaultError: When the runtime would refuse the value.
        """
        return self.masked(environ, devices)

    def masked(
        self, environ: Mapping[str, str], devices: Sequence[Device], mask: Mask | None = None
    ) -> list[str] | None:
        """Ids of the devices that the mask, or another one, leaves visible; None when it hides none.

        Raises:
            FaultError: When the runtime would refuse the value.
        """
        mask = mask or self.mask
        seen = mask.read(environ, [device for device in devices if self.maskable(device)]) if mask else None
        return None if seen is None else [device.id for device in seen]

    def container(self, devices: Sequence[Device]) -> ContainerEdits:
        """Say what a container needs so that exactly these devices work inside."""
        return ContainerEdits(
            nodes=tuple(dict.fromkeys((*self.shared_nodes(devices), *(n for d in devices for n in d.nodes)))),
            mounts=tuple(self.mounts(devices)),
            env=self.container_env(devices),
        )

    def shared_nodes(self, devices: Sequence[Device]) -> Iterable[str]:
        """Device nodes that a container needs beside those of the devices: the control nodes, for any device."""
        return self.control_nodes if devices else ()

    def mounts(self, devices: Sequence[Device]) -> Iterable[Mount]:
        """Files and directories of the host that a container needs: those that are there of :attr:`host_paths`."""
        there = {path for name, path in self.host_paths for device in devices if device.attributes.get(name)}
        return [Mount(source=path, target=path) for path in sorted(there)]

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Variables of a container, its runtime's among them."""
        return {}

    # How it is now.

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Measure memory, load, temperature and power, with the vendor's tool or library.

        Returns:
            What was measured by device id; None when there is nobody to ask. A device that is left out is one that the
            tool should have shown.

        Raises:
            FaultError: When the tool hangs, fails, or cannot be understood.
        """
        return None

    def measured(
        self, rows: Mapping[str, Row] | None, devices: Sequence[Device], *names: str
    ) -> dict[str, Measures] | None:
        """What :meth:`measure` returns, of a tool's rows by PCI address; None where they are None.

        Args:
            rows: What the tool said; None where it is not installed.
            devices: The devices.
            names: As of :meth:`Row.measures`.

        Raises:
            FaultError: As :meth:`Row.measures` does.
        """
        if rows is None:
            return None
        own = {device.id: rows.get(device.pci_bus_id or "") for device in devices}
        return {name: row.measures(*names) for name, row in own.items() if row is not None}

    def stats(self, devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
        """Observe devices now: what is measured, the health that a new look tells, and who holds them.

        Raises:
            FaultError: As :meth:`measure` does.
        """
        measured = self.measure(ctx, devices) or {}
        processes = self.processes(ctx, devices)
        cards = {card.id: card for card in self.survey(ctx)}
        found = {}
        for device in devices:
            health, fault = self.judge(device, cards.get(device.id))
            found[device.id] = Stats(
                **measured.get(device.id, {}),
                processes=processes.get(device.id),
                health=health,
                health_reason=fault.reason,
                health_remedy=fault.remedy,
            )
        return found

    def judge(self, device: Device, card: Card | None) -> tuple[Health, Fault]:
        """Say how a device is, by what was seen of it just now; ``card`` is None when it is gone."""
        if card is None:
            fault = Fault("it is gone from the PCI bus", f"{self.log_hint}, then restart the machine")
            return Health.UNHEALTHY, fault
        if card.fault is None and not self.maskable(device):
            return Health.UNHEALTHY, Fault(device.health_reason, device.health_remedy)
        return card.health, card.fault or Fault("")

    def processes(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, tuple[DeviceProcess, ...] | None]:
        """Say who holds devices: by default, the processes that have one of :meth:`held_nodes` open.

        Returns:
            Processes by device id; None, or no entry, where some processes could not be seen.
        """
        holders = Holders(ctx, (node for device in devices for node in self.held_nodes(device)))
        return {device.id: holders.of(self.held_nodes(device)) for device in devices}

    def held_nodes(self, device: Device) -> Sequence[str]:
        """The nodes of a device that only its holder has open, as :attr:`held` says."""
        return {"first": device.nodes[:1], "every": device.nodes, "none": ()}[self.held]

    def diagnose(self, ctx: ProbeContext) -> Sequence[Finding]:
        """Look for what is wrong with this vendor here.

        The core itself says which devices are unhealthy and why, what ``notes`` tells, and which masks hide all.
        """
        detected = self.detect(ctx)
        if detected is None:
            return ()
        if not detected.devices and not detected.notes:
            where = f"'lspci -d {self.pci_vendors[0]:04x}:' and " if self.pci_vendors else ""
            reason = f"the {self._driver_name} driver is loaded and no {self.brand} device is on the PCI bus"
            return (warn(reason, f"check {where}the seating of the boards"),)
        return (*self.measuring_faults(ctx, detected.devices), *self.findings(ctx, detected))

    def measuring_faults(self, ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
        """Say what keeps :meth:`measure` from telling how the devices are."""
        if self.tool is None or not devices:
            return
        try:
            measured = self.measure(ctx, devices)
        except FaultError as error:
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
        """Say what else is wrong: rival variables, settings of the machine, what the kernel log tells."""
        return ()

    # The hooks: each calls the method of its name.

    @hookimpl
    def anyaccel_info(self) -> PluginInfo:
        """See :meth:`info`."""
        return self.info()

    @hookimpl
    def anyaccel_detect(self, ctx: ProbeContext) -> Detected | None:
        """See :meth:`detect`."""
        return self.detect(ctx)

    @hookimpl
    def anyaccel_fractional(self, device: Device) -> Fractional:
        """See :meth:`fractional`."""
        return self.fractional(device)

    @hookimpl
    def anyaccel_tags(self, device: Device) -> Sequence[str]:
        """See :meth:`tags`."""
        return self.tags(device)

    @hookimpl
    def anyaccel_env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """See :meth:`env`."""
        return self.env(devices, ctx)

    @hookimpl
    def anyaccel_visible(
        self, environ: Mapping[str, str], devices: Sequence[Device]
    ) -> Sequence[str | VisiblePart] | None:
        """See :meth:`visible`."""
        return self.visible(environ, devices)

    @hookimpl
    def anyaccel_validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """See :meth:`validate`."""
        return self.validate(request, devices)

    @hookimpl
    def anyaccel_stats(self, devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
        """See :meth:`stats`."""
        return self.stats(devices, ctx)

    @hookimpl
    def anyaccel_container(self, devices: Sequence[Device]) -> ContainerEdits:
        """See :meth:`container`."""
        return self.container(devices)

    @hookimpl
    def anyaccel_diagnose(self, ctx: ProbeContext) -> Sequence[Finding]:
        """See :meth:`diagnose`."""
        return self.diagnose(ctx)

    @hookimpl
    def anyaccel_products(self) -> Sequence[Product]:
        """See :meth:`products`."""
        return self.products()


def inventory(cards: Sequence[Card], version: str, notes: Iterable[str] = (), *, partial: bool = False) -> Detected:
    """Make the inventory of cards.

    Args:
        cards: The cards, in their order.
        version: Version of the driver; empty when unknown.
        notes: What people should know beside the devices.
        partial: Whether something is missing that no card says itself.
    """
    return Detected(
        devices=tuple(card.device() for card in cards),
        driver_version=version,
        partial=partial or any(card.partial for card in cards),
        notes=tuple(notes),
    )
