"""One file per method, and one for what several share."""

import fedlit.strategy  # noqa: F401  (so that Trainer(strategy="federated") is known)
from fedlit.methods.adabn import AdaBN
from fedlit.methods.baselines import FinetuneOffline, Oracle, SourceOnly, TargetOnly
from fedlit.methods.co_mda import CoMDA
from fedlit.methods.distillation import TargetDistillation
from fedlit.methods.fada import FADA
from fedlit.methods.fed_analytic import FedAnalytic
from fedlit.methods.fed_dadil import FedDaDiL
from fedlit.methods.fed_dann import FADE, FedDANN
from fedlit.methods.fed_mmd import FedMMD
from fedlit.methods.fed_mme import FedMME
from fedlit.methods.fed_wdgrl import FedWDGRL
from fedlit.methods.fedavg import FedAvg
from fedlit.methods.fedgp import FedDA, FedGP
from fedlit.methods.fedprox import FedProx
from fedlit.methods.fedrep import FedRep
from fedlit.methods.fedrf_tca import FedRFTCA
from fedlit.methods.fedrf_tca_closed_form import FedJDA, FedRFTCAClosedForm
from fedlit.methods.gala import GALA
from fedlit.methods.kd3a import KD3A
from fedlit.methods.knn_per import KNNPer
from fedlit.methods.moment_matching import FedCORAL, FedDAN
from fedlit.methods.personalised import APFL, Ditto
from fedlit.methods.shot import SHOT, T3A

# fmt: off
__all__ = [
    "APFL", "FADA", "FADE", "GALA", "KD3A", "SHOT", "T3A", "AdaBN", "CoMDA", "Ditto", "FedAnalytic", "FedAvg",
    "FedCORAL", "FedDA", "FedDAN", "FedDANN", "FedDaDiL", "FedGP", "FedJDA", "FedMMD", "FedMME", "FedProx", "FedRFTCA",
    "FedRFTCAClosedForm", "FedRep", "FedWDGRL", "FinetuneOffline", "KNNPer", "Oracle", "SourceOnly",
    "TargetDistillation", "TargetOnly",
]
# fmt: on
