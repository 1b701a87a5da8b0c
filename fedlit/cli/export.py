"""``fedlit export RUN_DIR``: the target's model of a run, in a file that needs no fedlit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedlit.cli.loading import load


def export(args: list[str]) -> None:
    """Write the target's model of a run."""
    parser = argparse.ArgumentParser(
        "fedlit export",
        description="Write the target's model of a run to a file that needs no fedlit, from inputs (n, ...) to class "
        "probabilities (n, C), in regression to numbers. Inputs are those that the run's data module has before it "
        "normalises them. Run it where the run was trained: relative paths of data in its config.yaml are looked for "
        "from there.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="Folder that fedlit fit left, with config.yaml.")
    parser.add_argument(
        "--config",
        action="append",
        help="Configuration of the run, if RUN_DIR has none, as at a site whose process is not the first; several are "
        "laid over each other.",
    )
    parser.add_argument(
        "--ckpt_path",
        type=Path,
        help="Checkpoint; default is the one in RUN_DIR/checkpoints, and of several the one that has trained for most "
        "rounds, of equals the one written last.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="File: NAME.pt2 for torch.export.load, NAME.onnx for ONNX; default is RUN_DIR/target.pt2.",
    )
    options = parser.parse_args(args)
    configs = options.config or [str(options.run_dir / "config.yaml")]
    if options.config is None and not Path(configs[0]).is_file():
        sys.exit(
            f"fedlit: RUN_DIR must be a folder that fedlit fit left, but '{configs[0]}' is not there: give one such as "
            "runs/FedAvg/version_0, or the configuration of the run (--config). A script exports its model itself: "
            "RunRecord(export='target.onnx'), or fedlit.export.export_target"
        )
    load("fedlit.cli.stored:write")(options.run_dir, configs, options.ckpt_path, options.output)
