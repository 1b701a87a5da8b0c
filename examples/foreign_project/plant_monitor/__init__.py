"""Faults of rotating machines in three plants, told from vibrations."""
