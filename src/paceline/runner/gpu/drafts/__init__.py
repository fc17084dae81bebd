"""Drafts on the device: what makes them, and the steps that verify them."""
