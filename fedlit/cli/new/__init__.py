"""``fedlit new``: a folder with a configuration and a README that run."""
