"""YAML for ``fedlit fit --config``, installed with the package."""
