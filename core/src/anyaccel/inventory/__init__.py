"""What is on a machine: this one, a recorded one or a simulated one."""
