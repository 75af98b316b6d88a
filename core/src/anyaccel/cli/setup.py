"""Make what all users of this machine share: the directories of leases and of their journals, and a configuration.

Without it, each user sees only their own leases. Existing files stay unchanged, so that the command can be repeated.
Leases that users hold already are moved into the directory.
"""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.cli.table import print_table

EXAMPLES = (
    ("sudo anyaccel setup", "once for a machine"),
    ("anyaccel setup --dry-run", "what that would do"),
    ("anyaccel setup --root image", "in a system that is being built"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--dry-run", action="store_true", help="change nothing; show what would be made")
    parser.add_argument(
        "--root", metavar="DIR", default="", help="set up the system in this directory, such as an image"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from anyaccel.ledger.setup import check_user, steps

    # A path below the root is made by putting both together.
    root = args.root.rstrip("/")
    if not args.dry_run:
        check_user(root)
    rows = []
    for step in steps(root):
        if not step.done and not args.dry_run:
            step.perform()
        state = "there" if step.done else "to be made" if args.dry_run else "made"
        rows.append((step.path, state, step.summary))
    if args.json:
        made = [{"path": path, "state": state} for path, state, _ in rows]
        output.print_json("setup/1", {"steps": made})
    else:
        print_table(("PATH", "STATE", "WHAT"), rows)
    return 0
