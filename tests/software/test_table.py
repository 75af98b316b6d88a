"""The table of support shows what the tests of vendors' own software have found."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_software.py"


def test_the_column_of_the_table_is_made_of_the_results():
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
