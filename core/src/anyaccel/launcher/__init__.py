"""What holds devices and starts what was asked for: environments, commands, jobs and sweeps."""
