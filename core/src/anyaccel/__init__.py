"""anyaccel: find the accelerators of a machine, hand them out, start workers that see exactly theirs."""
