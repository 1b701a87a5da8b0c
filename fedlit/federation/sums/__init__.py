"""Secure sums over a federation: who sends, what the backend's parties exchange, and where totals are kept."""
