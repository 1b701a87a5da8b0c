"""Domain adaptation without networks, as scikit-learn estimators on NumPy arrays.

All samples are in one place here. For one domain per client see :mod:`fedlit.methods`.
"""

from fedlit.shallow.coral import CORAL
from fedlit.shallow.geodesic import GFK
from fedlit.shallow.selection import LeaveOneSourceOut, OnSource
from fedlit.shallow.transfer_components import JDA, RFTCA, RTCA, TCA

__all__ = ["CORAL", "GFK", "JDA", "RFTCA", "RTCA", "TCA", "LeaveOneSourceOut", "OnSource"]
