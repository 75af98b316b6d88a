"""The process that forks workers: its server, its client, and what a forked worker does."""
