"""Promises of all values of the model."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
from anyaccel.model import Device, EnvEdits, Finding, Request, Severity, Term, Value, replace

GPU = Device(id="a", index=0, model="M", links={"b": 2})
TERM = Term(names=("GPU", "TPU"), units=5000)


class Given(Request):
    """A grant of an engine."""

    grants: "tuple[int, ...]"
    units: "tuple[tuple[str, int], ...]" = ()

    def __eq__(self, other):
        return isinstance(other, Given) and (self.terms, self.units) == (other.terms, other.units)

    def __hash__(self):
        return hash((self.terms, self.units))


def values(kind=Value):
    """Return every imported class of values."""
    return {each for below in kind.__subclasses__() for each in (below, *values(below))}


def test_a_value_has_what_was_given_and_else_defaults():
    assert (GPU.id, GPU.index, GPU.links, GPU.units, GPU.pci_bus_id) == ("a", 0, {"b": 2}, 10_000, None)


def test_a_default_that_can_change_is_made_anew():
    one, other = EnvEdits(), EnvEdits()
    assert one.set == {}
    assert one.set is not other.set


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device(id="a"), "Device() needs index, model"),
        (
            lambda: Term(names=(), filter=()),
            "Term() got an unexpected keyword argument 'filter'; did you mean filters?",
        ),
        (
            lambda: Finding(severity=Severity.OK, zzz=1),
            "Finding() got an unexpected keyword argument 'zzz'; it has severity, reason, remedy",
        ),
        (lambda: replace(GPU, indx=1), "Device() got an unexpected keyword argument 'indx'; did you mean index?"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == message


def test_arguments_are_named_and_not_counted():
    with pytest.raises(TypeError):
        Term(("GPU",))


@pytest.mark.parametrize("change", [lambda: setattr(GPU, "index", 1), lambda: delattr(GPU, "index")])
def test_a_value_never_changes(change):
    with pytest.raises(AttributeError, match=r"^Device never changes, so its 'index' cannot be"):
        change()
    with pytest.raises(AttributeError):
        GPU.other = 1
    assert GPU.index == 0


def test_values_are_equal_by_class_and_content():
    assert Term(names=("GPU", "TPU"), units=5000) == TERM
    assert replace(TERM, linked=True) != TERM
    assert hash(replace(TERM, linked=True, units=1)) == hash(replace(TERM, units=1, linked=True))
    assert len({TERM, replace(TERM)}) == 1
    assert (TERM == 1, TERM != 1) == (False, True)
    with pytest.raises(TypeError, match="unhashable"):
        hash(GPU)  # it holds a mapping


def test_a_class_may_inherit_fields_and_compare_in_its_own_way():
    request = Given(terms=(TERM,), grants=(), units=(("a", 1),))
    assert (request.terms, request.else_cpu, request.units) == ((TERM,), False, (("a", 1),))
    assert request == replace(request, grants=(1,))
    assert Request(terms=(TERM,)) != request


def test_the_form_in_python_makes_it_again():
    assert repr(TERM) == "Term(names=('GPU', 'TPU'), units=5000, filters=(), linked=False, mixed=False, memory_bytes=0)"
    assert eval(repr(TERM)) == TERM


@pytest.mark.parametrize(
    "other",
    [copy.copy, copy.deepcopy, replace, *(lambda value, n=n: pickle.loads(pickle.dumps(value, n)) for n in range(6))],
)
def test_copies_and_pickles_are_equal(other):
    assert other(GPU) == GPU
    assert type(other(GPU)) is Device


def test_functions_of_dataclasses_take_values():
    assert dataclasses.is_dataclass(GPU)
    assert dataclasses.replace(GPU, index=3) == replace(GPU, index=3)
    assert dataclasses.asdict(Request(terms=(TERM,)))["terms"][0]["units"] == 5000
    by_name = {field.name: field for field in dataclasses.fields(Device)}
    assert list(by_name)[:3] == ["id", "index", "model"]
    assert by_name["id"].default is dataclasses.MISSING
    assert (by_name["units"].default, by_name["links"].default_factory) == (10_000, dict)
    assert dataclasses.fields(GPU)[0] is dataclasses.fields(Device)[0]  # made once: plug-ins replace often
    assert "grants" in {field.name for field in dataclasses.fields(Given)}


@pytest.mark.skipif(sys.version_info < (3, 13), reason="copy.replace came with Python 3.13")
def test_copy_replace_takes_values():
    assert copy.replace(GPU, index=3) == replace(GPU, index=3)


def test_no_value_has_more_than_its_fields():
    import anyaccel.launcher.hold  # noqa: F401 - for the values that come with it

    assert len(values()) > 30
    assert [kind for kind in values() if "__dict__" in dir(kind)] == []


def test_the_model_is_made_without_generated_code():
    code = f"""
import sys
sys.path[:] = {sys.path!r}
import anyaccel.model
print(sorted({{"dataclasses", "inspect", "typing"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_annotations_that_are_no_text_are_refused_with_the_way_out():
    with pytest.raises(TypeError, match="the annotations of Plain must be text: write 'from __future__ import"):
        exec("class Plain(Value):\n    count: int\n", {"Value": Value, "__name__": __name__})
