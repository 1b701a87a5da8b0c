"""What is watched while a method trains."""

__all__: list[str] = []
