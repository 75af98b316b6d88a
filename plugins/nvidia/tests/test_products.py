"""Products: simulated devices behave like detected devices."""

import pytest
from anyaccel.plugin import Fractional
from anyaccel.vendors.simulate import Cards, find_cards, match_products, simulate
from anyaccel_nvidia import plugin

PRODUCTS = plugin.anyaccel_products()
RAY_CONSTANTS = {
    *("V100", "P100", "T4", "P4", "K80", "A10G", "L4", "L40S", "A100", "A100-40G", "A100-80G"),
    *("H100", "H200", "H20", "B200", "B300", "GB200", "GB300", "RTX-PRO-6000"),
}


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.model)
def test_a_simulated_product_goes_by_its_name_and_its_aliases(product):
    (device,) = simulate("nvidia", [Cards(product=product, number=1)]).devices
    tags = plugin.anyaccel_tags(device)
    assert tags[0] == product.name
    assert set(product.aliases) <= set(tags)
    assert plugin.anyaccel_fractional(device) is Fractional.SHARED


@pytest.mark.parametrize("name", sorted(RAY_CONSTANTS))
def test_every_name_that_ray_knows_can_be_simulated(name):
    product = match_products(name, PRODUCTS)[0]
    (device,) = simulate("nvidia", [Cards(product=product, number=1)]).devices
    assert name in plugin.anyaccel_tags(device)


def test_names_and_aliases_mean_one_product_each():
    models = [product.model for product in PRODUCTS]
    assert len(set(models)) == len(models)
    aliases = [alias for product in PRODUCTS for alias in product.aliases]
    assert len(set(aliases)) == len(aliases)
    assert not set(aliases) & {product.name for product in PRODUCTS}


def test_a_simulated_card_can_be_divided_into_mig_devices():
    # Three instances of 2g fit a card: seven slices of compute, one of them unused.
    cards = find_cards("A100-40G/A100-MIG-2g.10gb", 2, PRODUCTS)
    assert cards is not None
    devices = simulate("nvidia", [cards]).devices
    assert len(devices) == 6
    assert len({device.parent for device in devices}) == 2
    assert {plugin.anyaccel_tags(device)[0] for device in devices} == {"A100-MIG-2g.10gb"}
