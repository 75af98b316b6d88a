"""Discovery and registration of plug-ins, one typed method per hook, and what happens when one is at fault."""
