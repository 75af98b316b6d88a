"""Objects of Kubernetes against its published OpenAPI schemas, from the package kubernetes-validate."""

import json
from functools import cache
from importlib.resources import files
from importlib.util import find_spec

INSTALLED = find_spec("kubernetes_validate") is not None
WHERE = "needs kubernetes-validate (try: tox -e kubernetes)"
NAMED = ("1.34", "1.36")
"""Releases for which every object must be valid; beside these the newest that the package has."""


@cache
def releases():
    """The releases to check, oldest first."""
    names = [each.name for each in _folder().iterdir() if each.name.endswith("-local-strict")]
    newest = max((name.removeprefix("v").split(".")[:2] for name in names), key=lambda parts: [*map(int, parts)])
    return tuple(dict.fromkeys((*NAMED, ".".join(newest))))


def check(document, chosen=None):
    """Refuse an object that a release's schema does not allow, unknown fields included.

    Raises:
        jsonschema.ValidationError: With the place in the object.
    """
    for release in chosen or releases():
        _validator(release, document["kind"], document["apiVersion"]).validate(document)


def _folder():
    return files("kubernetes_validate") / "kubernetes-json-schema"


@cache
def _definitions(release):
    from referencing import Registry, Resource

    path = _folder() / f"v{release}.0-local-strict" / "_definitions.json"
    return Resource.from_contents(json.loads(path.read_text())) @ Registry()


@cache
def _validator(release, kind, api):
    # The package's own function reads 2 MB of definitions for each object.
    import jsonschema

    group, _, version = api.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], version)))
    schema = json.loads((_folder() / f"v{release}.0-local-strict" / f"{name}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=_definitions(release))
