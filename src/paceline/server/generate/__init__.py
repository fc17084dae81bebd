"""From a checked request to its text: admission, the engine's stream, the record of how it went."""
