"""What the federation has come to for Long Beach, next to scikit-learn, and whether the exported model says the same.

    python compare.py [SITES]

Predicts all of Long Beach's patients from its own part of the checkpoint, exports the model, runs it with onnxruntime
on rows of the CSV, and scores the patients without a label with ``truth.csv``. Logistic regression and boosting on the
tables of all hospitals together are oracles of what is in the data: nobody may pool them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import torch
from make_tables import HOSPITALS, TARGET
from sklearn.base import BaseEstimator
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, roc_auc_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torchmetrics.functional.classification import binary_calibration_error


def predicted(site: Path, config: Path) -> pd.DataFrame:
    """Class and probabilities of each patient of the site, by its part of the checkpoint."""
    part = max(site.glob("runs/*/version_*/checkpoints/*.ckpt*"), key=lambda path: path.stat().st_mtime)
    part = part.relative_to(site)
    given = ["--config", os.path.relpath(config, site), "--ckpt_path", str(part), "--trainer.num_nodes=1"]
    rows = f"--data.init_args.predict_file={TARGET}.csv"
    call(
        site, "predict", *given, rows, "--trainer.callbacks+=TargetPredictions", "--trainer.callbacks.csv=patients.csv"
    )
    call(site, "export", str(part.parents[1]), *given[:4], "--output", "model.onnx")
    return pd.read_csv(site / "patients.csv").set_index("id")


def call(site: Path, *words: str) -> None:
    """Run the command of fedlit at the site."""
    done = subprocess.run(
        [sys.executable, "-m", "fedlit.cli", *words], cwd=site, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def by_onnx(site: Path) -> tuple[np.ndarray, dict[str, str]]:
    """Probabilities of the exported model for the rows of the CSV as they are, and what it says of itself."""
    session = onnxruntime.InferenceSession(site / "model.onnx")
    texts = {each.name: str for each in session.get_inputs() if "string" in each.type}
    table = pd.read_csv(site / f"{TARGET}.csv", dtype=texts)
    rows = {
        each.name: (
            table[[each.name]].fillna("") if each.name in texts else table[[each.name]].astype(float)
        ).to_numpy()
        for each in session.get_inputs()
    }
    return session.run(None, rows)[0], session.get_modelmeta().custom_metadata_map


def baseline(model: BaseEstimator, tables: list[pd.DataFrame]) -> Pipeline:
    """A model of scikit-learn, trained on tables together."""
    numbers = make_column_selector(dtype_include="number")
    scale = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler())
    levels = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    prepare = make_column_transformer((scale, numbers), (levels, make_column_selector(dtype_exclude="number")))
    prepare.set_output(transform="pandas")
    return make_pipeline(prepare, model).fit(features(pd.concat(tables)), pd.concat(tables)["disease"])


def features(table: pd.DataFrame) -> pd.DataFrame:
    """What is predicted from, with texts where a category is missing."""
    table = table.drop(columns=["patient", "disease"])
    texts = table.select_dtypes(exclude="number").columns
    known = {name: table[name].astype(object).where(table[name].notna(), "missing") for name in texts}
    return table.assign(**{name: column.map(str) for name, column in known.items()})


def standardised(table: pd.DataFrame) -> pd.DataFrame:
    """Numbers in units of the hospital's own spread."""
    numbers = table.select_dtypes("number")
    return table.assign(**((numbers - numbers.mean()) / numbers.std().replace(0, 1)).to_dict("series"))


def score(truth: pd.Series, ill: np.ndarray) -> dict[str, float]:
    """Area under the ROC curve, expected calibration error in ten bins, and Brier score."""
    wanted = (truth == "yes").to_numpy().astype(int)
    error = binary_calibration_error(torch.tensor(ill), torch.tensor(wanted), n_bins=10, norm="l1")
    return {"auc": roc_auc_score(wanted, ill), "ece": float(error), "brier": brier_score_loss(wanted, ill)}


def main(sites: Path) -> dict[str, object]:
    """Print the table, and return what it has."""
    site = sites / TARGET
    found = predicted(site, Path(__file__).with_name("hospitals.yaml").resolve())
    onnx, about = by_onnx(site)
    difference = float(np.abs(found[["no", "yes"]].to_numpy() - onnx).max())
    truth = pd.read_csv(sites / "truth.csv").set_index("patient")["disease"]
    tables = {name: pd.read_csv(sites / name / f"{name}.csv") for name in HOSPITALS}
    hidden = tables[TARGET].set_index("patient")["disease"].isna()
    unknown = hidden.index[hidden]
    temperature = float(about["fedlit.temperature"])
    logits = temperature * np.log(found.loc[unknown, ["no", "yes"]].to_numpy())
    before = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = {
        "federation, before calibration": score(truth[unknown], before[:, 1]),
        f"federation, at temperature {temperature:.2f}": score(truth[unknown], found.loc[unknown, "yes"].to_numpy()),
    }
    labelled = {name: standardised(table.dropna(subset="disease")) for name, table in tables.items()}
    asked = features(standardised(tables[TARGET]).set_index("patient", drop=False).loc[unknown])
    for name, model in (
        ("logistic regression", LogisticRegression(max_iter=10000)),
        ("gradient boosting", HistGradientBoostingClassifier(random_state=0)),
    ):
        for whose, some in (("pooled", [*labelled.values()]), ("Long Beach alone", [labelled[TARGET]])):
            fitted = baseline(model, some)
            rows[f"{name}, {whose} (oracle)"] = score(truth[unknown], fitted.predict_proba(asked)[:, 1])
    print(pd.DataFrame(rows).T.round(3).to_string())
    print(f"onnxruntime on the rows of the CSV differs by at most {difference:.1e}")
    return {"rows": rows, "onnx": difference, "patients": len(unknown)}


if __name__ == "__main__":
    results = main(Path(sys.argv[1] if len(sys.argv) > 1 else "sites"))
    versions = {name: version(name) for name in ("fedlit", "torch", "scikit-learn", "onnxruntime")}
    results |= {"versions": versions, "cores": os.cpu_count(), "seed": 0}
    Path("hospitals.json").write_text(json.dumps(results, indent=2) + "\n")
