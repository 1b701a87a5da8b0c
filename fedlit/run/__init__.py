"""How clients are trained: rounds, replicas, evaluation, checkpoints and optimisation, below the base of methods."""
