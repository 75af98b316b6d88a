"""The grammar of requests."""

import re

import pytest
from anyaccel.errors import RequestError
from anyaccel.model import Request, Term
from anyaccel.scheduler import parse_request
from anyaccel.scheduler.filters import FILTERS
from hypothesis import example, given
from hypothesis import strategies as st

GIB = 1 << 30

names = st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,8}", fullmatch=True)
units = st.one_of(st.integers(1, 9_999), st.integers(1, 1_000_000).map(lambda count: count * 10_000))
texts = st.lists(
    st.sampled_from(["mem=7B", "mem=40GiB", "driver=550.54+", "driver=1-2", "numa=1", "id=GPU-8"]),
    unique_by=lambda text: text.split("=")[0],
)
filters = texts.map(lambda found: parse_request(",".join(["GPU", *found])).terms[0].filters)
terms = st.builds(
    Term,
    names=st.lists(names, min_size=1, max_size=3, unique_by=str.lower).map(tuple),
    units=units,
    filters=filters,
    linked=st.booleans(),
    mixed=st.booleans(),
)
requests = st.builds(Request, terms=st.lists(terms, min_size=1, max_size=4).map(tuple), else_cpu=st.booleans())


@given(requests)
def test_text_of_a_request_means_the_request(request_):
    assert parse_request(str(request_)) == request_
    assert parse_request(request_) is request_


@given(st.text(max_size=40) | st.from_regex(r"[A-Z|]{0,4}:?[0-9.]{0,6}(,[a-z=0-9A-Z]{0,8}){0,2}", fullmatch=True))
def test_any_text_is_a_request_or_refused(text):
    try:
        request_ = parse_request(text)
    except RequestError as error:
        message = str(error)
    else:
        message = ""
        assert parse_request(str(request_)) == request_
    assert len(message) < 300


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPU", Term(names=("GPU",))),
        ("GPU:2", Term(names=("GPU",), units=20_000)),
        ("GPU:2.0", Term(names=("GPU",), units=20_000)),
        ("GPU:0.5", Term(names=("GPU",), units=5_000)),
        ("GPU:0.0001", Term(names=("GPU",), units=1)),
        ("GPU:0.3333", Term(names=("GPU",), units=3_333)),
        ("nvidia:1", Term(names=("nvidia",))),
        ("H100:4,linked", Term(names=("H100",), units=40_000, linked=True)),
        ("H100|A100:2", Term(names=("H100", "A100"), units=20_000)),
        ("H100|h100|A100", Term(names=("H100", "A100"))),
        ("GPU,mixed,LINKED", Term(names=("GPU",), mixed=True, linked=True)),
        ("neuron_cores:2", Term(names=("neuron_cores",), units=20_000)),
        ("GPU:1,mem=40GiB", Term(names=("GPU",), filters=(("mem", "40GiB"),))),
        ("GPU:1,mem=40G", Term(names=("GPU",), filters=(("mem", "40GiB"),))),
        ("GPU:1,mem=40gb", Term(names=("GPU",), filters=(("mem", "40GB"),))),
        ("GPU:1,mem=1.5KiB", Term(names=("GPU",), filters=(("mem", "1536B"),))),
        ("GPU:1,mem=0.0001KB", Term(names=("GPU",), filters=(("mem", "1B"),))),
        ("GPU:1,mem=7B", Term(names=("GPU",), filters=(("mem", "7B"),))),
        ("GPU:1,mem=2TB", Term(names=("GPU",), filters=(("mem", "2TB"),))),
    ],
)
def test_a_term(text, expected):
    assert parse_request(text) == Request(terms=(expected,))


def test_terms_come_as_words_or_as_a_list():
    expected = Request(terms=(Term(names=("GPU",), units=20_000), Term(names=("TPU",))), else_cpu=True)
    assert parse_request(" GPU:2,else=cpu\n TPU ") == expected
    assert parse_request(["GPU:2,else=cpu", "TPU"]) == expected
    assert parse_request(("GPU:2 TPU,else=cpu",)) == expected


wrong = st.lists(
    st.sampled_from(["GPU", "num", *FILTERS, *".=:|,019", "0.00001", "GiB", "cpu", "else", "é", "{}"]),
    min_size=1, max_size=6,
).map("".join)  # fmt: skip


@given(wrong)
@example("num=0")
@example("numa=")
@example("9" * 20)
@example("GPU:0.00001")
@example("gpu/0\0-1:5.5")
def test_a_request_that_a_message_offers_follows_the_grammar(text):
    try:
        parse_request(text)
    except RequestError as error:
        offered = re.search(r"(?:ask for|did you mean|behind a (?:colon|comma):) (\S+?)(?: or (\S+))?\??$", str(error))
    else:
        offered = None
    for each in filter(None, offered.groups() if offered else ()):
        parse_request(each)


DECIMAL = "a quantity must be a plain decimal more than 0, such as 2 or 0.5"
SIZE = "'mem' must be a number with a unit of B, KB, KiB, MB, MiB, GB, GiB, TB, TiB"
FORMS = ", ".join(entry.form for entry in FILTERS.values() if entry.name.isalpha())
OPTION = f"an option must be one of {FORMS}, linked, mixed, else=cpu"
NAME = "a name must be a letter, then letters, digits and . _ -"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("2", f"{NAME} (got '2'); did you mean GPU:2?"),
        ("0.5", f"{NAME} (got '0.5'); did you mean GPU:0.5?"),
        ("20GiB", f"{NAME} (got '20GiB'); did you mean GPU:20GiB?"),
        ("else=cpu", f"{NAME} (got 'else=cpu'); an option stands behind a comma: GPU:1,else=cpu"),
        ("NUMA=0", f"{NAME} (got 'NUMA=0'); an option stands behind a comma: GPU:1,numa=0"),
        ("GPU=0.5", f"{NAME} (got 'GPU=0.5'); a quantity stands behind a colon: GPU:0.5"),
        ("linked", "'linked' is an option, which stands behind a comma: GPU:2,linked"),
        ("GPU|:2", f"{NAME} (got '')"),
        ("ГПУ", f"{NAME} (got 'ГПУ')"),
        ("GPU:", f"{DECIMAL} (got '')"),
        ("GPU:-1", f"{DECIMAL} (got '-1')"),
        ("GPU:1e3", f"{DECIMAL} (got '1e3')"),
        ("GPU:inf", f"{DECIMAL} (got 'inf')"),
        ("GPU:nan", f"{DECIMAL} (got 'nan')"),
        ("GPU:\u0662", f"{DECIMAL} (got '\u0662')"),
        ("GPU:.5", f"{DECIMAL} (got '.5')"),
        ("GPU:1:2", f"{DECIMAL} (got '1:2')"),
        ("GPU:0", "a quantity must be more than 0; leave the term out to ask for none"),
        ("GPU:0.0000", "a quantity must be more than 0; leave the term out to ask for none"),
        ("GPU:1.5", "a quantity above one device must be whole (got 1.5); ask for GPU:1 or GPU:2"),
        ("GPU:0.33333", "a share must have at most 4 decimals (got '0.33333'); ask for GPU:0.3333"),
        ("GPU:0.00001", "a share must have at most 4 decimals (got '0.00001'); ask for GPU:0.0001"),
        ("GPU:2000000", "a quantity must be at most 1000000 devices (got 2000000)"),
        ("GPU:99999999", "a quantity must be at most 1000000 devices (got '99999999')"),
        ("GPU,", f"{OPTION} (got '')"),
        ("GPU,link", f"{OPTION} (got 'link')"),
        ("GPU,linked=1", "'linked' must stand without a value (got 'linked=1')"),
        ("GPU,mixed,mixed", "an option must be given once (got 'mixed' twice)"),
        ("GPU,else=tpu", "'else' must be else=cpu (got 'else=tpu')"),
        ("GPU,mem=40", f"{SIZE} (got '40')"),
        ("GPU,mem=-1G", f"{SIZE} (got '-1G')"),
        ("GPU,mem=1e3G", f"{SIZE} (got '1e3G')"),
        ("GPU,mem=", f"{SIZE} (got '')"),
        ("GPU,mem=0G", "'mem' must be more than 0 (got '0G'); leave it out"),
    ],
)
def test_what_is_refused_and_why(text, fault):
    with pytest.raises(RequestError) as refused:
        parse_request(text)
    assert str(refused.value) == f"request {text!r}: {fault}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a request must name at least one device (got none); ask for 'GPU:1', for example"),
        ([], "a request must name at least one device (got none); ask for 'GPU:1', for example"),
        ("G" * 5_000, "a request must have at most 4000 characters (got 5000)"),
        ("G " * 65, "a request must have at most 64 terms (got 65)"),
    ],
)
def test_what_is_no_request_at_all(text, message):
    with pytest.raises(RequestError) as refused:
        parse_request(text)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2, "a request must be text such as 'GPU:2', a list of such texts or a Request (got 2 that is a int)"),
        ([1], "a request must be text such as 'GPU:2', a list of such texts or a Request (got [1] that is a list)"),
        (
            b"GPU",
            "a request must be text such as 'GPU:2', a list of such texts or a Request (got b'GPU' that is a bytes)",
        ),
        (Request(terms=()), "a request must have 1 to 64 terms (got 0)"),
        (Request(terms="GPU"), "the terms of a request must be a tuple of Term (got 'GPU')"),
        (Request(terms=(Term(names="GPU"),)), "'names' of a term must be a tuple of texts (got 'GPU')"),
        (
            Request(terms=(Term(names=("GPU",), units=1.5),)),
            "'units' of a term must be a whole number of 1/10000 (got 1.5)",
        ),
        (Request(terms=(Term(names=("GPU",), linked="no"),)), "'linked' of a term must be True or False (got 'no')"),
        (
            Request(terms=(Term(names=("GPU",), filters={"mem": "1G"}),)),
            "'filters' of a term must be a tuple of pairs of texts (got {'mem': '1G'})",
        ),
        (
            Request(terms=(Term(names=("GPU",), units=15_000),)),
            "request 'GPU:1.5': a quantity above one device must be whole (got 1.5); ask for GPU:1 or GPU:2",
        ),
        (
            Request(terms=(Term(names=("G,U",)),)),
            "a term's names must each be a letter, then letters, digits and . _ - (got ('G,U',))",
        ),
        (
            Request(terms=(Term(names=("GPU",), filters=(("mem", "0B"),)),)),
            "request 'GPU:1,mem=0B': 'mem' must be more than 0 (got '0B'); leave it out",
        ),
        (
            Request(terms=(Term(names=("GPU",), filters=(("color", "red"),)),)),
            f"request 'GPU:1,color=red': a filter must be one of {', '.join(FILTERS)} (got 'color')",
        ),
        (
            Request(terms=(Term(names=("GPU",), filters=(("mem", "1G"), ("mem", "2G"))),)),
            "request 'GPU:1,mem=1G,mem=2G': a filter must be given once (got 'mem' twice)",
        ),
    ],
)
def test_values_made_by_hand_are_checked_too(value, message):
    with pytest.raises(RequestError) as refused:
        parse_request(value)
    assert str(refused.value) == message
