"""What is watched while a method trains, and what is reported about it afterwards."""

from fedlit.callbacks.aggregation_curves import AggregationCurves
from fedlit.callbacks.calibration import Calibration
from fedlit.callbacks.clinic import ClinicMetrics
from fedlit.callbacks.communication_ledger import CommunicationLedger
from fedlit.callbacks.dictionary_pictures import DictionaryPictures
from fedlit.callbacks.intervals import ConformalIntervals
from fedlit.callbacks.oracle_accuracy import OracleAccuracy
from fedlit.callbacks.privacy_report import PrivacyReport
from fedlit.callbacks.round_progress_bar import RoundProgressBar
from fedlit.callbacks.round_timer import RoundTimer
from fedlit.callbacks.run_record import RunRecord
from fedlit.callbacks.run_summary import RunSummary, summarise
from fedlit.callbacks.selection import TrustedRound
from fedlit.callbacks.summary import closing_table
from fedlit.callbacks.target_predictions import TargetPredictions
from fedlit.callbacks.tracking import Artifacts, MLflow
from fedlit.callbacks.validators import Validators

__all__ = [
    "AggregationCurves",
    "Artifacts",
    "Calibration",
    "ClinicMetrics",
    "CommunicationLedger",
    "ConformalIntervals",
    "DictionaryPictures",
    "MLflow",
    "OracleAccuracy",
    "PrivacyReport",
    "RoundProgressBar",
    "RoundTimer",
    "RunRecord",
    "RunSummary",
    "TargetPredictions",
    "TrustedRound",
    "Validators",
    "closing_table",
    "summarise",
]
