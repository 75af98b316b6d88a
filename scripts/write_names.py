"""Write what follows from the catalogs of the plug-ins in this repository: ``python scripts/write_names.py``.

These are a copy of each catalog that is read faster, the names of its products in the plug-in's presence.json, and all
names for the conformance suite, which compares a plug-in with all vendors, installed or not.
"""

import json
import sys
import textwrap
from pathlib import Path

from anyaccel.kit import Catalog
from anyaccel.vendors.process import known

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "plugins"
KNOWN_NAMES = ROOT / "extras" / "testing" / "src" / "anyaccel_testing" / "known_names.json"


def main() -> None:
    """Write the files of all plug-ins in this repository."""
    for path in PLUGINS.glob("*/src/*/*.toml"):
        Catalog(str(path), path.name).keep()
    found, problems = known()
    if problems:
        sys.exit("\n".join(map(str, problems)))
    known_names = {}
    for each in found:
        for path in PLUGINS.glob(f"{each.info.vendor}/src/*/presence.json"):
            names = dict.fromkeys(name for product in each.products for name in (product.name, *product.aliases))
            known_names[each.info.vendor] = {"resource": each.info.resource, "names": [*names]}
            text = path.read_text().partition(',\n  "names"')[0].removesuffix("\n}\n")
            lines = textwrap.wrap(", ".join(map(json.dumps, names)), 112, break_on_hyphens=False)
            indented = "".join(f"\n    {line}" for line in lines)
            path.write_text(f'{text},\n  "names": [{indented}\n  ]\n}}\n')
    lines = (f"  {json.dumps(vendor)}: {json.dumps(told)}" for vendor, told in sorted(known_names.items()))
    KNOWN_NAMES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
