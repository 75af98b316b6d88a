"""What the API server checks of ResourceSlices and DeviceClasses, as far as it can be checked without one.

Written down from the public API types of Kubernetes 1.34 (staging/src/k8s.io/api/resource/v1/types.go) and the rules of
pkg/apis/resource/validation, for the fields that a driver needs; any other field is refused, as strict decoding does.
CEL expressions are compared with the one form that is written here: there is no CEL compiler to ask.
"""

import re

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
"""As ``IsDNS1123Subdomain`` has it: what stands between the dots has no longest length of its own."""
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?|[eE][0-9]+)?")
SELECTOR = re.compile(r'device\.driver == "([^"\\]+)" && device\.attributes\["([^"\\]+)"\]\.(\w+) == "([^"\\]+)"')


def subdomain(text, most=253):
    return len(text) <= most and SUBDOMAIN.fullmatch(text)


def keys(value, required, optional=()):
    """Strict decoding: the value is an object with these fields."""
    assert isinstance(value, dict), value
    assert set(required) <= set(value) <= {*required, *optional}, sorted(value)


def check(documents):
    """Check all objects that are applied together."""
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names)), names
    slices = [document for document in documents if document["kind"] == "ResourceSlice"]
    for document in documents:
        keys(document, ("apiVersion", "kind", "metadata", "spec"))
        assert document["apiVersion"] == "resource.k8s.io/v1"
        keys(document["metadata"], ("name",))
        assert subdomain(document["metadata"]["name"]), document["metadata"]
        {"ResourceSlice": check_slice, "DeviceClass": check_class}[document["kind"]](document["spec"])
    check_pools(slices)


def check_slice(spec):
    keys(spec, ("driver", "pool", "nodeName", "devices"))
    assert subdomain(spec["driver"], 63)
    assert subdomain(spec["nodeName"])
    keys(spec["pool"], ("name", "generation", "resourceSliceCount"))
    pool = spec["pool"]
    assert all(subdomain(part) for part in pool["name"].split("/"))
    assert len(pool["name"]) <= 253
    assert is_integer(pool["generation"])
    assert pool["generation"] >= 0
    assert is_integer(pool["resourceSliceCount"])
    assert pool["resourceSliceCount"] > 0
    assert isinstance(spec["devices"], list)
    assert len(spec["devices"]) <= 128
    for device in spec["devices"]:
        check_device(device)


def check_device(device):
    keys(device, ("name",), ("attributes", "capacity"))
    assert LABEL.fullmatch(device["name"]), device["name"]
    attributes, capacity = device.get("attributes", {}), device.get("capacity", {})
    assert len(attributes) + len(capacity) <= 32
    for name in (*attributes, *capacity):
        domain, slash, identifier = name.rpartition("/")
        assert not slash or subdomain(domain, 63), name
        assert IDENTIFIER.fullmatch(identifier), name
    for value in attributes.values():
        check_attribute(value)
    for value in capacity.values():
        keys(value, ("value",))
        assert isinstance(value["value"], str)
        assert QUANTITY.fullmatch(value["value"]), value


def check_attribute(value):
    assert len(value) == 1, value
    [(kind, content)] = value.items()
    if kind == "string":
        assert isinstance(content, str)
        assert len(content.encode()) <= 64, content
    elif kind == "int":
        assert is_integer(content)
        assert -(1 << 63) <= content < 1 << 63
    else:
        assert kind == "bool", kind
        assert isinstance(content, bool)


def check_class(spec):
    keys(spec, ("selectors",))
    assert 1 <= len(spec["selectors"]) <= 32
    for selector in spec["selectors"]:
        keys(selector, ("cel",))
        keys(selector["cel"], ("expression",))
        assert len(selector["cel"]["expression"]) <= 10 * 1024
        assert SELECTOR.fullmatch(selector["cel"]["expression"]), selector


def check_pools(slices):
    """A pool is complete when it has as many slices as each of them says; its devices have different names."""
    pools = {}
    for found in slices:
        pools.setdefault((found["spec"]["driver"], found["spec"]["pool"]["name"]), []).append(found["spec"])
    for members in pools.values():
        assert {member["pool"]["resourceSliceCount"] for member in members} == {len(members)}
        names = [device["name"] for member in members for device in member["devices"]]
        assert len(names) == len(set(names)), names


def chosen_by(device_class, slices):
    """The devices that a class selects."""
    [selector] = device_class["spec"]["selectors"]
    driver, domain, attribute, value = SELECTOR.fullmatch(selector["cel"]["expression"]).groups()
    return [
        device
        for found in slices
        for device in found["spec"]["devices"]
        if (found["spec"]["driver"], domain) == (driver, driver) and device["attributes"][attribute]["string"] == value
    ]


def is_integer(value):
    return isinstance(value, int) and not isinstance(value, bool)
