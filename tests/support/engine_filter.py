"""A filter that only this test has, on every engine: one entry in the table, on whatever machine it is asked."""

import anyaccel as aa
import pytest
from anyaccel.scheduler.filters import FILTERS

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # Ray's own
]

WAIT = 120
SOURCE = '''
from anyaccel.scheduler.filters import FILTERS, Filter

class Word(Filter):
    """The last word of the model."""

    name = "word"
    form = "word=WORD"
    summary = "has a model with this last word: word=One"

    def read(self, text):
        return text

    def predicate(self, asked):
        return lambda device: self.fact(device, asked.inventory) == asked.wanted

    def fact(self, device, inventory):
        return device.model.split()[-1]

FILTERS["word"] = Word()
'''


@pytest.fixture
def site(acme_site, tmp_path):
    """Where every process of a node finds the filter, and has it from its start."""
    (tmp_path / "sitecustomize.py").write_text(SOURCE)
    known = dict(FILTERS)
    exec(SOURCE, {})
    yield f"{tmp_path}:{acme_site}"
    FILTERS.clear()
    FILTERS.update(known)


@pytest.mark.usefixtures("acme")
def test_a_filter_of_a_test_works(filtered):
    with aa.Pool(**filtered) as pool:
        for word in ("One", "Whole"):
            future = pool.options(needs=f"APU:1,word={word}").submit(abs, -1)
            assert future.result(WAIT) == 1
            assert {device.model for device in future.allocation.devices} == {f"Acme {word}"}
        with pytest.raises(aa.NeverFitsError, match="not word=Two"):
            pool.options(needs="APU:1,word=Two")
