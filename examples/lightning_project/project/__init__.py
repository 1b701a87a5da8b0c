"""Tells how a patient breathes from a belt around the chest."""
