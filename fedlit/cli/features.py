"""``fedlit features``: what a fixed network makes of all samples, computed once, in a file for FeatureDomains."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser

from fedlit.cli.known import load

PROG = "fedlit features"


def features(args: list[str]) -> None:
    """Write the features of a data module's samples."""
    if {"-h", "--help"} & {*args}:
        make_parser(None).parse_args(["--help"])
    load("fedlit.cli.extraction:extract")(args)


def make_parser(base: type | None) -> ArgumentParser:
    """What the command takes; ``base`` of data modules is ``None`` where help alone is wanted, which needs no torch."""
    parser = ArgumentParser(
        prog=PROG,
        description="Run a fixed network once over all samples of each client's data, as they are in evaluation, and "
        "write its features to an .npz file for fedlit.data.FeatureDomains: CLIENT_x (float32), CLIENT_y (int64, -1 "
        "where there is no label), classes. The same command again goes on where it was killed.",
    )
    parser.add_argument("--config", "-c", action="config", help="Configuration with data; its other keys are left out.")
    what = "The data module, such as fedlit.data.ImageDomains, and its arguments: --data.root FOLDER."
    if base is None:
        parser.add_argument("--data", required=True, metavar="CLASS", help=what)
    else:
        parser.add_subclass_arguments(base, "data", required=True, help=what)
    parser.add_argument(
        "--extractor",
        required=True,
        help="The network: a name of torchvision's, such as resnet50, timm/NAME (extra timm), efficientnet_lite0 "
        "(extra backbones; brings its weights), or a class such as fedlit.models.ResNet or my_package.MyNetwork. A "
        "pretrained network gets images as it was trained on, where --data leaves that open.",
    )
    parser.add_argument("--extractor_args", type=dict[str, Any], default={}, help="Arguments of a class, as YAML.")
    parser.add_argument("--weights", type=str | None, default=None, help="File of the network's state dict.")
    parser.add_argument("--out", type=str, required=True, help="The file, NAME.npz.")
    parser.add_argument("--clients", type=list[str] | None, default=None, help="Of these alone; default: all here.")
    parser.add_argument("--batch_size", type=int, default=32, help="Samples that go through the network at a time.")
    parser.add_argument("--device", type=str, default="cpu", help="On which: cpu, cuda, cuda:1, ...")
    return parser
