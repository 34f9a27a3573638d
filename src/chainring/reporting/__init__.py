"""Reported values and their means."""
