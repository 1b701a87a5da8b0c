"""A method, a privacy backend, a data module and a validator for fedlit, each the smallest that does something."""
