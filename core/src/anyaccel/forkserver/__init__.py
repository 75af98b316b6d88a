"""The fork server: a process that forks, guards and tears down other processes for its caller."""
