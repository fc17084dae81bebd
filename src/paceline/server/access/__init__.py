"""Who may use the server: keys, callers and rate limits."""
