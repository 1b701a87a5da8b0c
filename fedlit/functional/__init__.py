"""Pure maths on tensors: what the methods compute, without Lightning and without clients."""

from fedlit.functional.aggregation import fedavg
from fedlit.functional.scores import information_score

__all__ = ["fedavg", "information_score"]
