"""Routes of the HTTP API: bodies in, answers and streams out."""
