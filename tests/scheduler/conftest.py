"""Makes the builders of this directory importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
