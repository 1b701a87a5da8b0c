"""The tables and figures of the five papers: what each was, how to run it here, and what came out."""
