"""The checks of a plug-in are made all at once, when the first is asked for: one worker has them all."""

import pytest
from anyaccel.testing import AcceleratorPluginTests


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the checks of each plug-in into a group of their own."""
    for item in items:
        owner = getattr(item, "cls", None)
        if owner is not None and issubclass(owner, AcceleratorPluginTests):
            item.add_marker(pytest.mark.xdist_group(owner.__name__))
