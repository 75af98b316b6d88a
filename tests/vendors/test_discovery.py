"""Discovery of plug-ins without an import."""

import os

import anyaccel as aa
import pytest
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


def test_installed_plugins_and_modules_are_named_side_by_side(install):
    install("zeta", "")
    install("acme", "")
    found = installed({"ANYACCEL_PLUGINS": "b=pkg.b:plugin,zeta , acme = mine"})
    assert found == (
        [
            Source(vendor="acme", target="mine"),
            Source(vendor="b", target="pkg.b:plugin"),
            Source(vendor="zeta", target="plug_anyaccel_zeta", distribution="anyaccel-zeta", version="1.2.3"),
        ],
        [],
    )


def test_a_module_that_is_not_there_is_told_beside_what_is_used(acme, anyaccel, record):
    done = anyaccel("--machine", record({}), env={"ANYACCEL_PLUGINS": "bad=nope,acme"})
    assert "vendor 'bad': importing 'nope' raised ModuleNotFoundError" in done.stderr
    assert "acme-s0" in done.stdout


@pytest.mark.parametrize(
    ("value", "item", "written"),
    [
        ("acme,bad=", "'bad='", "bad=package.module"),
        ("=good,acme", "'=good'", "acme=good"),
        ("=", "'='", "acme=package.module"),
    ],
)
def test_an_item_without_a_vendor_or_a_module_is_an_error(acme, value, item, written):
    with pytest.raises(aa.UsageError) as raised:
        installed({"ANYACCEL_PLUGINS": value})
    assert f"must name a vendor and a module where there is a '=' (got {item}); write {written}" in str(raised.value)


def test_a_vendor_whose_plugin_is_named_twice_is_told(install):
    install("zeta", "", distribution="one")
    for value, names in (("zeta=mine,zeta=theirs", "mine and theirs"), ("zeta,zeta=mine", "mine and one")):
        sources, (problem,) = installed({"ANYACCEL_PLUGINS": value})
        assert (sources, problem.reason) == ([], f"{names} both claim the vendor 'zeta', so neither is used.")


def test_plugins_can_be_left_out(install):
    install("zeta", "")
    install("acme", "")
    assert vendors({"ANYACCEL_PLUGINS": "zeta,acme", "ANYACCEL_DISABLE": "acme"}) == ["zeta"]
    assert vendors({"ANYACCEL_PLUGINS": "zeta"}) == ["zeta"]
    assert "acme" not in vendors({"ANYACCEL_DISABLE": " acme , "})
    assert vendors({"ANYACCEL_PLUGINS": "a=x", "ANYACCEL_DISABLE": "a"}) == []


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"ANYACCEL_PLUGINS": "zeta", "ANYACCEL_DISABLE": "zeto"}, "(got 'zeto'; installed: "),
        ({"ANYACCEL_PLUGINS": "zeta", "ANYACCEL_DISABLE": "ZETA"}, "did you mean zeta"),
        ({"ANYACCEL_DISABLE": "zeta,no such vendor at all"}, "; take it out"),
    ],
)
def test_a_vendor_that_is_to_be_left_out_and_has_no_plugin_is_told_once(install, caplog, environ, told):
    install("zeta", "")
    for _ in range(2):
        installed(environ)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("anyaccel: ANYACCEL_DISABLE must name vendors whose plug-ins are installed")
    assert told in message


def test_a_command_tells_of_a_vendor_that_is_to_be_left_out_and_has_no_plugin(acme, record, anyaccel):
    done = anyaccel("--machine", record({}), env={"ANYACCEL_DISABLE": "acmee"}, timeout=300)  # a process of its own
    assert done.returncode == 0
    assert done.stderr.count("ANYACCEL_DISABLE must name vendors") == 1
    assert "acme-s0" in done.stdout


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
