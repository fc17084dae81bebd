"""Watching an engine: what happened in its steps since the last look, and how it stands now."""
