"""The HTTP server: an OpenAI-compatible front of one engine."""
