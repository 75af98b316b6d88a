"""Apptainer is on neither PyPI nor Debian: the flags are read by the rules of its manual.

``--bind`` takes ``SRC[:DEST[:OPTIONS]]``, several with commas. ``--env`` takes ``NAME=VALUE``, which is taken whole
where it holds one ``=``; a shell in the container reads the value.
"""

import re
import shlex

import pytest
from anyaccel.errors import EnvConflictError, UsageError
from anyaccel.model import ContainerEdits
from anyaccel_export.apptainer import export
from export_machines import READ_ONLY, WRITABLE, device, machines, source
from hypothesis import given, settings
from lengths import length

PAIR = (device(0), device(1))
BIND = re.compile(r"--bind=([^:,\"\\]+)(?::([^:,\"\\]+))?(?::(ro|rw))?")
ENV = re.compile(r"--env=([A-Za-z_][A-Za-z0-9_]*)=([^=\"'`$\\]*)")


def read(text):
    """Binds and variables, as Apptainer would take them."""
    binds, variables = [], {}
    words = shlex.split(text)
    assert words[:1] in ([], ["--contain"])
    for word in words[1:]:
        if found := BIND.fullmatch(word):
            binds.append(found.groups())
        else:
            name, value = ENV.fullmatch(word).groups()
            variables[name] = value
    return binds, variables


def test_flags():
    binds, variables = read(export(source(*PAIR, shared_nodes=("/dev/tty",), mounts=[READ_ONLY, WRITABLE])).text)
    assert binds == [
        ("/dev/tty", None, None),
        ("/dev/null", None, None),
        ("/dev/zero", None, None),
        ("/etc", "/host etc", "ro"),
        ("/tmp", "/scratch", None),
    ]
    assert variables == {"ACME_ALWAYS": "1", "ACME_RUNTIME": "acme-0,acme-1", "ACME_VISIBLE": "acme-0,acme-1"}


def test_without_devices_there_are_no_flags():
    assert export(source()).text == ""


def test_devices_that_need_nothing_are_told():
    exported = export(source(device(0), together={"acme": ContainerEdits()}))
    assert exported.text == ""
    assert exported.notes == (
        "There are no flags for the devices of acme, because a container needs nothing for them.",
    )


def test_groups_are_told_since_no_flag_gives_them():
    [note] = export(source(*PAIR, groups=(109, 44))).notes
    assert note == "The devices are open to group 44 and 109: the user of the container must be a member."


@pytest.mark.parametrize("path", ["/dev/a:b", "/dev/a,b"])
def test_a_path_that_cannot_be_a_flag_is_refused(path):
    with pytest.raises(UsageError, match="cannot be a flag of apptainer") as refused:
        export(source(device(0, nodes=(path,))))
    assert refused.value.hint == "use 'anyaccel export cdi', which has no such limit"


@pytest.mark.parametrize("value", ["a=b", '"a"', "$(touch pwned)", "`id`", "a\\"])
def test_a_value_that_a_shell_in_the_container_would_read_is_refused(value):
    with pytest.raises(UsageError, match="cannot be a flag of apptainer"):
        export(source(device(0), together={"acme": ContainerEdits(env={"ACME_VISIBLE": value})}))


def test_two_vendors_that_want_one_variable_are_refused():
    edits = {name: ContainerEdits(env={"SAME": name}) for name in ("acme", "other")}
    with pytest.raises(EnvConflictError):
        export(source(device(0), device(1, vendor="other"), together=edits))


@settings(max_examples=length(15, 40), deadline=None)
@given(machines())
def test_what_plugins_may_report_is_written_by_the_rules_or_refused(devices):
    try:
        text = export(source(*devices)).text
    except UsageError as error:
        assert "cannot be a flag of apptainer" in str(error)  # noqa: PT017 - either is right
    else:
        read(text)
