"""How facts about a machine are gathered: one gate for plug-ins, a guarded child process, record and replay."""
