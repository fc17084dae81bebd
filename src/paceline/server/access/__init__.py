"""Access to the server: keys, callers and rate limits."""
