"""A recording has no address of this host."""

import psutil
from anyaccel.inventory.record import collect_private_names


def test_every_address_of_the_host_is_known():
    listed = {each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found}
    assert listed <= set(collect_private_names().addresses)
