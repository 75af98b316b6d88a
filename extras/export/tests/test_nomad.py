import re

import hcl2
import pytest
from anyaccel.model import Health
from anyaccel_export.nomad import export
from export_machines import device, machines, source
from hypothesis import given, settings
from lark.exceptions import UnexpectedInput

pytestmark = pytest.mark.xdist_group("hcl")

UNREADABLE = re.compile(r"[$%]\{[^}]*\Z")
"""What python-hcl2 cannot read once it is escaped. Its lexer takes ``$${`` and ``%%{`` for the beginning of something
that a brace ends, so without one it reads on behind the quote. HCL's specification ("Template Literals") calls both
literal text.
"""

JOB = """\
job "train" {{
  group "train" {{
    task "train" {{
      driver = "docker"
      resources {{
{blocks}
      }}
    }}
  }}
}}
"""


def asked(text):
    """Name and count of each device that a job with these blocks asks for, as a parser of HCL 2 reads it."""
    job = hcl2.loads(JOB.format(blocks=text))
    found = job
    for key in ("job", "group", "task"):
        found = only(found[key][0])
    blocks = found["resources"][0].get("device", [])
    return {plain(name): block[name]["count"] for block in blocks for name in block if name != "__is_block__"}


def only(block):
    [name] = [name for name in block if name != "__is_block__"]
    return block[name]


def plain(name):
    """A name without the quotes that the parser keeps, and without the doubling that keeps templates away."""
    text = name[1:-1] if name.startswith('"') else name
    return text.replace("$${", "${").replace("%%{", "%{")


def test_one_block_for_each_model():
    devices = (device(0), device(1), device(2, model="Acme Two", kind="apu"), device(3, health=Health.UNHEALTHY))
    assert export(source(*devices)).text == (
        'device "acme/gpu/Acme One" {\n  count = 2\n}\n\ndevice "acme/apu/Acme Two" {\n  count = 1\n}\n'
    )


def test_a_model_cannot_begin_a_template():
    text = export(source(device(0, model='${env "x"} %{if} "q"'))).text
    assert r'device "acme/gpu/$${env \"x\"} %%{if} \"q\"" {' in text


def test_nothing_to_ask_for():
    assert export(source()).text == ""


def test_a_model_may_open_a_brace_and_not_close_it():
    text = export(source(device(0, model="${"), device(1, model="%{ if", kind="apu"))).text
    assert text == (
        'device "acme/gpu/$${" {\n  count = 1\n}\n\n'  # by the specification; see UNREADABLE
        'device "acme/apu/%%{ if" {\n  count = 1\n}\n'
    )


@pytest.mark.full  # the parser takes seconds to read its own grammar
@settings(max_examples=20, deadline=None)
@given(machines().filter(lambda devices: not any(UNREADABLE.search(each.model) for each in devices)))
def test_a_parser_reads_whatever_plugins_may_report(devices):
    found = asked(export(source(*devices)).text)
    assert sum(found.values()) == len(devices)


@pytest.mark.full  # as above
def test_the_parser_refuses_what_is_wrong():
    with pytest.raises(UnexpectedInput):
        asked('device "acme {\n  count = 1\n}\n')
