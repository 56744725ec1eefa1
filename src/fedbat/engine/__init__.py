"""Engines run the clients of a round; `sequential` is the specification of all others."""
