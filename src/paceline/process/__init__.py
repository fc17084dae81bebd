"""The engine in a separate process, and the client that talks to it."""
