"""Finding plug-ins without importing them."""

import os

import anyaccel as aa
from anyaccel.vendors.discovery import Source, installed


def vendors(environ):
    return [source.vendor for source in installed(environ)[0]]


def test_entry_points_are_found_with_their_distribution(install):
    install("zeta", "raise SystemExit", distribution="zeta-accelerators", version="4.5")
    (source,), problems = installed({"ANYACCEL_PLUGINS": "zeta"})
    assert source == Source(
        vendor="zeta", target="plug_zeta_accelerators", distribution="zeta-accelerators", version="4.5"
    )
    assert problems == []


def test_an_explicit_list_needs_no_scan(monkeypatch):
    monkeypatch.setattr("anyaccel.vendors.discovery.scan", lambda: (_ for _ in ()).throw(AssertionError("scanned")))
    environ = {"ANYACCEL_PLUGINS": "b=pkg.b:plugin, a=pkg_a"}
    assert installed(environ)[0] == [Source(vendor="a", target="pkg_a"), Source(vendor="b", target="pkg.b:plugin")]


def test_plugins_can_be_left_out(install):
    install("zeta", "")
    install("acme", "")
    assert vendors({"ANYACCEL_PLUGINS": "zeta,acme", "ANYACCEL_DISABLE": "acme"}) == ["zeta"]
    assert vendors({"ANYACCEL_PLUGINS": "zeta"}) == ["zeta"]
    assert "acme" not in vendors({"ANYACCEL_DISABLE": " acme , "})
    assert vendors({"ANYACCEL_PLUGINS": "a=x", "ANYACCEL_DISABLE": "a"}) == []


def test_two_distributions_for_one_vendor_are_both_kept_out(install):
    install("zeta", "", distribution="one")
    install("zeta", "", distribution="two")
    sources, (problem,) = installed({"ANYACCEL_PLUGINS": "zeta"})
    assert sources == []
    assert problem.reason == "one and two both claim the vendor 'zeta', so neither is used."
    assert problem.next_step == "Uninstall one, or set ANYACCEL_PLUGINS=zeta=MODULE to choose."


def test_the_plugin_that_found_devices_is_asked_about_them_whatever_the_environment_says(acme, record, monkeypatch):
    environ = dict(os.environ)
    monkeypatch.setenv("ANYACCEL_PLUGINS", "none")
    inventory = aa.detect(record({}), environ=environ)
    assert aa.prepare("APU:1", inventory=inventory).environment.values["ACME_VISIBLE"] == "acme-s0"
