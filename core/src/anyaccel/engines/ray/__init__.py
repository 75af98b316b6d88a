"""Ray: what its nodes are told, and what its workers see."""
