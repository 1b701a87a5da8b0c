"""Scripts that made the figures of the documentation, each with the figures; ``fedlit benchmark`` runs them."""
