"""What holds for the tests of all distributions."""

import pytest
from anyaccel.testing import AcceleratorPluginTests
from hypothesis import HealthCheck, settings

# How long anything takes says how much else the machine does.
settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anywhere")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the checks of each plug-in into a group: they are made all at once, so one worker has them all."""
    for item in items:
        owner = getattr(item, "cls", None)
        if owner is not None and issubclass(owner, AcceleratorPluginTests):
            item.add_marker(pytest.mark.xdist_group(owner.__name__))
