"""Text of others as plain text."""

import pytest
from anyaccel.text import cells, printable, shown
from hypothesis import given
from hypothesis import strategies as st

anything = st.text(st.characters())  # lone surrogates among them


@given(anything)
def test_what_is_printable_is_one_line_of_as_many_characters(text):
    plain = printable(text)
    assert plain.isprintable()
    assert len(plain) == len(text)
    assert printable(plain) == plain
    assert text.isprintable() <= (plain == text)
    plain.encode()


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("a\nb\tc\r\u2028\u2029\x85\xa0d", "a b c     d"),
        ("\x1b[31m\x9b\x07\x7f\x00", "\ufffd[31m\ufffd\ufffd\ufffd\ufffd"),
        ("\u202a\u202e\u2066\u2069\u200b\u200f\ufeff", "\ufffd" * 7),
        ("\ud800 \udcff", "\ufffd \ufffd"),
        ("[/x] :warning: \u65e5\u672c \xe9", "[/x] :warning: \u65e5\u672c \xe9"),
    ],
)
def test_white_space_becomes_blank_and_what_has_no_glyph_is_replaced(text, plain):
    assert printable(text) == plain


@pytest.mark.parametrize(("text", "width"), [("abc", 3), ("\u65e5\u672c", 4), ("e\u0301", 1), ("\uff21b", 3)])
def test_columns_of_a_terminal(text, width):
    assert cells(text) == width


def test_a_wrong_value_is_shown_in_short():
    nested = [1]
    for _ in range(100_000):
        nested = [nested]
    assert shown("x") == "'x'"
    assert shown("x" * 100) == f"'{'x' * 59}..."
    assert shown(nested) == "a list"
    assert shown(10**5000) == "a int"
