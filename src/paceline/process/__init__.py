"""The engine in a process of its own, and the client that talks to it."""
