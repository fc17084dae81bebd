"""Engines on other machines: what listens there, and what keeps a link to it here."""
