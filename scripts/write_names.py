"""Write the names of each plug-in's products into its presence.json, and all of them for the conformance suite.

``python scripts/write_names.py``. The suite compares a plug-in with all vendors, installed or not.
"""

import json
import sys
import textwrap
from pathlib import Path

from anyaccel.vendors.process import known

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "plugins"
KNOWN_NAMES = ROOT / "extras" / "testing" / "src" / "anyaccel_testing" / "known_names.json"


def main() -> None:
    """Write the files of all plug-ins in this repository."""
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
