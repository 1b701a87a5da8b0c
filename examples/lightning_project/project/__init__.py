"""Classifies breathing from a belt around the chest."""
