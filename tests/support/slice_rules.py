"""What the API server checks of ResourceSlices and DeviceClasses beyond their schema.

The rules are those of resource.k8s.io/v1 in Kubernetes 1.36. Names and types of fields are in the schema; see
published_schemas.py.
"""

import re

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?|[eE][0-9]+)?")
TAINT_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
QUALIFIED = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


class InvalidError(Exception):
    """The API server answers 422."""


def need(holds, what):
    if not holds:
        raise InvalidError(what)


def subdomain(text, most=253):
    return len(text) <= most and bool(SUBDOMAIN.fullmatch(text))


def qualified(name):
    domain, slash, identifier = name.rpartition("/")
    need((not slash or subdomain(domain, 63)) and IDENTIFIER.fullmatch(identifier), name)


def check(found):
    need(subdomain(found["metadata"]["name"]), found["metadata"])
    spec = found["spec"]
    selected = [
        field for field in ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection") if spec.get(field)
    ]
    need(selected == ["nodeName"], selected)
    need("devices" not in spec or "sharedCounters" not in spec, "devices and sharedCounters exclude each other")
    need(subdomain(spec["driver"], 63), spec["driver"])
    need(subdomain(spec["nodeName"]), spec["nodeName"])
    pool = spec["pool"]
    need(len(pool["name"]) <= 253 and all(subdomain(part) for part in pool["name"].split("/")), pool)
    need(pool["generation"] >= 0, pool)
    need(pool["resourceSliceCount"] > 0, pool)
    devices = spec.get("devices", [])
    advanced = any("taints" in device or "consumesCounters" in device for device in devices)
    need(len(devices) <= (64 if advanced else 128), len(devices))
    need(len({device["name"] for device in devices}) == len(devices), "names of devices")
    for device in devices:
        check_device(device)
    sets = spec.get("sharedCounters", [])
    need(len(sets) <= 8, len(sets))
    need(len({each["name"] for each in sets}) == len(sets), "names of counter sets")
    for each in sets:
        need(LABEL.fullmatch(each["name"]), each["name"])
        check_counters(each["counters"])


def check_counters(counters):
    need(1 <= len(counters) <= 32, counters)
    for name, value in counters.items():
        need(LABEL.fullmatch(name), name)
        need(QUANTITY.fullmatch(value["value"]), value)


def check_device(device):
    need(LABEL.fullmatch(device["name"]), device["name"])
    attributes, capacity = device.get("attributes", {}), device.get("capacity", {})
    need(len(attributes) + len(capacity) <= 32, "attributes and capacities")
    for name in (*attributes, *capacity):
        qualified(name)
    for value in attributes.values():
        need(len(value) == 1, value)
        [(kind, content)] = value.items()
        if kind == "string":
            need(0 < len(content.encode()) <= 64, content)
        if kind == "int":
            need(-(1 << 63) <= content < 1 << 63, content)
    for value in capacity.values():
        check_capacity(value, many=device.get("allowMultipleAllocations", False))
    taints = device.get("taints", [])
    need(len(taints) <= 4, taints)
    for taint in taints:
        domain, slash, name = taint["key"].rpartition("/")
        need((not slash or subdomain(domain)) and QUALIFIED.fullmatch(name), taint)
        need(TAINT_VALUE.fullmatch(taint.get("value", "")), taint)
        need(taint["effect"] in ("None", "NoSchedule", "NoExecute"), taint)
    consumed = device.get("consumesCounters", [])
    need(len(consumed) <= 2, consumed)
    for each in consumed:
        need(LABEL.fullmatch(each["counterSet"]), each)
        check_counters(each["counters"])


def amount(text):
    need(QUANTITY.fullmatch(text), text)
    units = {f"{unit}i": 1 << 10 * power for power, unit in enumerate("KMGTPE", 1)} | {"": 1}
    number, unit = re.fullmatch(r"([0-9]+)(.*)", text).groups()
    return int(number) * units[unit]


def check_capacity(value, *, many):
    most = amount(value["value"])
    policy = value.get("requestPolicy")
    if policy is None:
        return
    need(many, "requestPolicy needs allowMultipleAllocations")
    given = policy["validRange"]
    least, default = amount(given["min"]), amount(policy["default"])
    need(least <= default <= most, policy)
    if "step" in given:
        step = amount(given["step"])
        need(step > 0 and (default - least) % step == 0 and (most - least) % step == 0, policy)


def check_pool(slices):
    """A pool is complete if there are as many slices of one generation as each says; names are its own."""
    specs = [each["spec"] for each in slices]
    need({spec["pool"]["resourceSliceCount"] for spec in specs} == {len(specs)}, "count")
    need(len({spec["pool"]["generation"] for spec in specs}) == 1, "generation")
    devices = [device for spec in specs for device in spec.get("devices", [])]
    need(len({device["name"] for device in devices}) == len(devices), "names of devices")
    sets = {each["name"]: each["counters"] for spec in specs for each in spec.get("sharedCounters", [])}
    for device in devices:
        for each in device.get("consumesCounters", []):
            need(each["counterSet"] in sets, each)
            need(set(each["counters"]) <= set(sets[each["counterSet"]]), each)


def check_all(slices):
    """Check each slice of a pool, and the pool."""
    for each in slices:
        check(each)
    check_pool(slices)


def allows(slices, names):
    """Whether a scheduler may allocate these devices of a pool together: enough is left of each counter."""
    left = {
        (each["name"], counter): amount(value["value"])
        for found in slices
        for each in found["spec"].get("sharedCounters", [])
        for counter, value in each["counters"].items()
    }
    for device in (device for found in slices for device in found["spec"].get("devices", ())):
        for each in device.get("consumesCounters", ()) if device["name"] in names else ():
            for counter, value in each["counters"].items():
                left[each["counterSet"], counter] -= amount(value["value"])
    return all(count >= 0 for count in left.values())


def check_class(found):
    need(subdomain(found["metadata"]["name"]), found["metadata"])
    extended = found["spec"].get("extendedResourceName", "example.com/x")
    domain, slash, name = extended.partition("/")
    need(slash and subdomain(f"requests.{domain}") and "kubernetes.io" not in domain, extended)
    need(QUALIFIED.fullmatch(name), extended)
    selectors = found["spec"].get("selectors", [])
    need(len(selectors) <= 32, len(selectors))
    for selector in selectors:
        expression = selector["cel"]["expression"]
        need(0 < len(expression) <= 10 * 1024, expression)
        # No compiler is here to ask: at least the texts end where they should.
        need(re.fullmatch(r'(?:[^"]|"(?:[^"\\]|\\.)*")*', expression), expression)
