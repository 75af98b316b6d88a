"""The one fork server: a process that forks others for its caller, guards them, and tells once what became of each."""
