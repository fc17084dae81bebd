"""Several engines of one model as one: where requests go, and how streams outlive an engine."""
