"""Write the names of each plug-in's products into its presence.json: ``python scripts/write_names.py``."""

import json
import sys
import textwrap
from pathlib import Path

from anyaccel.vendors.process import known

PLUGINS = Path(__file__).parents[1] / "plugins"


def main() -> None:
    """Write the files of all plug-ins in this repository."""
    found, problems = known()
    if problems:
        sys.exit("\n".join(map(str, problems)))
    for each in found:
        for path in PLUGINS.glob(f"{each.info.vendor}/src/*/presence.json"):
            names = dict.fromkeys(name for product in each.products for name in (product.name, *product.aliases))
            text = path.read_text().partition(',\n  "names"')[0].removesuffix("\n}\n")
            lines = textwrap.wrap(", ".join(map(json.dumps, names)), 112, break_on_hyphens=False)
            indented = "".join(f"\n    {line}" for line in lines)
            path.write_text(f'{text},\n  "names": [{indented}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
