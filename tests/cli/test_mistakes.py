"""A newcomer's mistakes, each told in its first line: in which file, at which key, what is wrong, what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from commands import instantiated, refusal
from fedlit.cli import main
from fedlit.cli.arguments import content_of, normalise
from fedlit.cli.mistakes import check

BASE = """
data: {class_path: fedlit.data.Digits, init_args: {target: fonts, flatten: true}}
model:
  class_path: fedlit.methods.FedAvg
  init_args:
    extractor: {class_path: fedlit.models.MLP, init_args: {in_features: 64}}
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
trainer: {max_epochs: 1}
"""
STRATEGY = "trainer.strategy"


def told(*words: str) -> str:
    return refusal(*words).splitlines()[0]


def write(key: str, value: Any) -> None:
    """A configuration that trains but for one key."""
    tree = branch = yaml.safe_load(BASE)
    *above, last = key.split(".")
    for part in above:
        branch = branch.setdefault(part, {})
    branch[last] = value
    Path("a.yaml").write_text(yaml.safe_dump(tree))


def strategy(**init_args: Any) -> dict[str, Any]:
    return {"class_path": "fedlit.FederatedStrategy", "init_args": init_args}


IN_A_FILE: list[tuple[str, Any, str]] = [
    ("model.class_path", "fedlit.methods.FedAvgg", "'FedAvgg': did you mean 'fedlit.methods.FedAvg'?"),
    ("model.init_args.warmup_round", 3, "'warmup_round': did you mean 'warmup_rounds'?"),
    ("model.init_args.weighting", "size", "must be one of samples, sqrt, uniform, got 'size'"),
    ("model", {"class_path": "FedProx", "mu": 0.1}, "stands beside class_path: put it below init_args"),
    ("model", ["FedAvg"], "must be one class, got the list ['FedAvg']: write model: and below it class_path"),
    ("model", {"class_path": "FedAvg"}, "is missing, and FedAvg needs it: fedlit fit --model.help FedAvg shows what"),
    ("model.init_args.extractor.init_args.hiden", [3], "'hiden': did you mean 'hidden'?"),
    ("model.init_args.extractor.init_args.hidden", 3, "must be a list, got 3: write [3]"),
    ("model.init_args.extractor", "resnet18", "there is no class 'resnet18'"),
    ("model.init_args.optimizer.class_path", "torch.optim.SDG", "'SDG': did you mean 'torch.optim.SGD'?"),
    ("data.init_args.flatten", "maybe", "must be true or false, got 'maybe'"),
    ("trainer.max_epoch", 3, "'s Trainer has no argument 'max_epoch': did you mean 'trainer.max_epochs'?"),
    ("trainer.callbacks", {"Validators": None}, "must be a list, got the mapping"),
    (
        STRATEGY,
        strategy(privacy={"class_path": "fedlit.privacy.PairwiseMasking", "init_args": {"codek": None}}),
        "'codek': did you mean 'codec'?",
    ),
    (STRATEGY, strategy(placement=[[False, "clean"], ["fonts"]]), "must be a list of texts or null, got [[False,"),
    ("compare", {"class_path": "FedProx"}, "must be a list of methods, got a mapping: put a hyphen"),
    ("compare", ["FedAvg", {"class_path": "FedProx", "mu": 1}], "stands beside class_path"),
    ("compare", [{"class_path": "FedProx", "data": {"targt": "clean"}}], "'targt': did you mean 'target'?"),
    ("data.init_args.target", False, "must be text, got 'False': YAML reads no, off and"),
    ("data.init_args.target", 3, "must be text, got 3: YAML reads digits without quotes as a number: if it is a name,"),
    ("data.init_args.clients", [True, "fonts"], "must be a list of texts or null, got [True, 'fonts']: YAML reads"),
    ("seeds", 3, "must be a list of whole numbers or null, got 3: write [3]"),
    ("seed", 1, "'seed': did you mean 'seeds'?"),
]
"""A key, a value there, and the problem that is named."""


@pytest.mark.parametrize(("key", "value", "problem"), IN_A_FILE)
def test_a_mistake_in_a_file_is_refused_with_its_place_and_what_to_write(key, value, problem):
    write(key, value)
    line = told("fit", "--config", "a.yaml")
    assert line.startswith(f"fedlit: a.yaml: {key.removesuffix('.class_path')}")
    assert problem in line


def test_a_key_that_yaml_reads_as_something_else_is_told_with_quotes():
    Path("no.csv").write_text("a,y\n1,x\n2,z\n")
    write("data", {"class_path": "CSVDomains", "init_args": {"label": "y", "files": {False: "no.csv", "se": "no.csv"}}})
    line = told("fit", "--config", "a.yaml")
    assert "files must have names in text, got False: YAML reads no, off and false without quotes as False" in line
    assert "quote it, as in 'no'" in line
    assert "data.init_args.files" in line


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--model.lr=3"], "--model.lr: FedAvg has no argument 'lr': did you mean 'model.optimizer.lr'?"),
        (["--model.extractor.hiddn", "[3]"], "--model.extractor.hiddn: MLP has no argument 'hiddn': did you mean"),
        (["--trainer.max_epoch=3"], "--trainer.max_epoch: Lightning's Trainer has no argument 'max_epoch': did you"),
        (["--trainer.max_epochs"], "--trainer.max_epochs: its value is missing"),
        (["--epochs=3"], "--epochs: there is no 'epochs': did you mean 'trainer.max_epochs'?"),
        (["--batch_size=3"], "--batch_size: there is no 'batch_size': did you mean 'data.batch_size'?"),
        (["--compare=[methods/fedprx]"], "compare: 'methods/fedprx' is no file and no installed configuration: did you"
         " mean 'methods/fedprox'?"),
        (["--targets=[fonts,font]"], "targets ['font'] are not among the clients ['clean', 'blended', 'fonts'"),
        (["experiments/first"], "'experiments/first' belongs to no option: write --config experiments/first"),
        (["--config", "experiments/frist"], "--config experiments/frist is no file and no installed configuration: did"
         " you mean 'experiments/first'?"),
        (["--config", "."], "--config . is a folder: give a file in it"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_option_is_told_by_its_name(options, line):
    write("trainer.max_epochs", 1)
    assert told("fit", "--config", "a.yaml", *options).startswith(f"fedlit: {line}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: {class_path: FedAvg\ndata: x\n", "a.yaml, line 2, column 5: this is no YAML"),
        ("seeds: [0]\ndata: Digits\nseeds: [1]\n", "a.yaml, line 3, column 1: 'seeds' is in line 1 too"),
        ("model:\n\tclass_path: FedAvg\n", "a.yaml, line 2, column 1: there is a tab, and YAML indents by spaces"),
        ("- a\n- b\n", "a.yaml must have keys, such as data:, model: and trainer:, got list"),
        ("", "a.yaml must have keys, such as data:, model: and trainer:, got nothing"),
    ],
)
def test_a_file_that_is_no_configuration_is_told_with_the_line(text, line):
    Path("a.yaml").write_text(text)
    assert told("fit", "--config", "a.yaml").startswith(f"fedlit: {line}")


def test_keys_of_a_merged_mapping_may_be_given_anew():
    Path("a.yaml").write_text("a: &a {x: 1, y: 2}\nb: &b\n  <<: *a\n  x: 3\nc:\n  <<: *b\n  x: 4\nd: *b\n")
    a, b, c = {"x": 1, "y": 2}, {"x": 3, "y": 2}, {"x": 4, "y": 2}
    assert content_of("a.yaml") == {"a": a, "b": b, "c": c, "d": b}


def test_what_a_constructor_refuses_is_told_with_the_file_that_has_it_unless_an_option_replaced_it():
    write("data.init_args.target", "font")
    refused = "fedlit: ValueError: target 'font' is not among the domains of Digits"
    line = told("fit", "--config", "a.yaml")
    assert line.startswith(refused)
    assert line.endswith("(a.yaml: data.init_args.target)")
    write("data.init_args.target", "fonts")
    assert told("fit", "--config", "a.yaml", "--data.target=font").endswith("(data.init_args.target)")


def test_a_constructor_that_ends_without_a_word_is_told_with_its_line(monkeypatch):
    Path("own_network.py").write_text(
        "from torch import nn\n\n\n"
        "class Network(nn.Module):\n    def __init__(self, width: int = 0):\n        assert width > 0\n"
    )
    monkeypatch.syspath_prepend(".")
    words = ("--data=Digits", "--model=FedAvg", "--model.extractor=own_network.Network")
    line = told("fit", *words)
    assert line.startswith("fedlit: ValueError: own_network.Network cannot be made: AssertionError in ")
    assert "own_network.py, line 6: assert width > 0" in line


def test_an_optimiser_and_its_arguments_may_be_options():
    words = ("fit", "--config=data/digits", "--config=methods/fedavg")
    (module,) = (each.model for each in instantiated(*words[1:], "--model.optimizer=SGD", "--model.optimizer.lr=0.25"))
    optimiser = module.run.local.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert (type(optimiser), optimiser.defaults["lr"]) == (torch.optim.SGD, 0.25)
    line = told(*words, "--model.optimizer=Adamm", "--model.optimizer.lr=0.1")
    assert "there is no class 'Adamm': did you mean 'Adam'?" in line
    assert "--model.optimizer Adam" in told(*words, "--model.optimizer.lr=0.1")


def test_nothing_given_at_all_is_told_with_a_way_to_begin():
    assert told("fit") == (
        "fedlit: no data and no model was given: add --config experiments/first, or another, or --model FedAvg --data "
        "Digits"
    )


def test_keys_with_dots_and_below_their_subcommand_are_no_mistakes():
    Path("a.yaml").write_text("fit:\n  data.class_path: Digits\n  model.class_path: FedAvg\n  model.init_args.muu: 3\n")
    assert told("fit", "--config", "a.yaml").startswith("fedlit: a.yaml: model.init_args.muu: FedAvg has no argument")


def test_no_shipped_configuration_has_a_mistake():
    for path in (Path(__file__).parents[2] / "configs").rglob("*.yaml"):
        of_recipe = {"features": "FeatureDomains", "signals": "SignalDomains"}
        data = f"--data={of_recipe.get(path.stem, 'Digits')}"
        if path.parent.name != "sweeps":
            check(normalise(["fit", "--config=experiments/digits", data, f"--config={path}"]))


def test_what_is_none_is_left_to_the_parser(monkeypatch):
    """Texts that are no YAML, backends by channel in place of one, a home folder, and classes of others."""
    monkeypatch.setenv("HOME", str(Path.cwd()))
    Path("one.yaml").write_text(yaml.safe_dump({STRATEGY: strategy(privacy={"class_path": "fedlit.privacy.Plain"})}))
    by_channel = {"update": {"class_path": "fedlit.privacy.CKKS"}}
    Path("two.yaml").write_text(yaml.safe_dump({STRATEGY: strategy(privacy=by_channel)}))
    check(["fit", "--config=~/one.yaml", "--config=two.yaml", f"--{STRATEGY}.privacy.update.class_path=BFV"])
    check(["fit", "--data=CSVDomains", "--data.files=[*.csv]", "--data.seed", "-1", "--trainer.strategy=federated"])
    check(["fit", "--model", "class_path: mine.Method\ninit_args: {anything: 3}", "--data", "class_path: Mine"])
    check(["fit", "--model=mine.Method", "--model.anything=3", f"--{STRATEGY}=ddp", f"--{STRATEGY}.anything=3"])
    check(["fit", '--config={"model": {"class_path": "FedAvgg"}}', "--config=s3://bucket/config.yaml"])
    with pytest.raises(SystemExit, match="Plain has no argument 'bits'"):
        check(["fit", "--config=one.yaml", f"--{STRATEGY}.privacy.bits=3"])


def test_the_help_of_a_method_says_what_the_data_give(capsys):
    with pytest.raises(SystemExit) as done:
        main(["fit", "--model.help", "FedProx"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    options = {part.split()[0]: " ".join(part.split()) for part in printed.split("\n  --model.")[1:]}
    for name in ("clients", "target", "num_classes", "task"):
        assert f"[--model.{name} " in printed  # brackets: need not be given
        assert "required" not in options[name]
        assert "Taken from the data module, and not given here." in options[name]
    assert "(required," in options["extractor"]
    assert "Strength of the proximal term" in printed
    assert "[--model.extractor " not in printed


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["--data.batch_size=null"], "data.init_args.batch_size must be a whole number, got null: leave it out"),
        (["--model.refine=null"], "model.init_args.refine must be true or false or 'network', got null"),
        (["--model.extractor.hidden=null"], "model.init_args.extractor.init_args.hidden must be a list, got null"),
    ],
)
def test_null_is_refused_where_a_value_is_needed(words, first):
    assert told("fit", "--config=data/digits", "--config=methods/fedavg", *words).startswith(f"fedlit: {first}")


def test_a_name_that_several_classes_have_is_told_with_their_paths():
    several = "there are several classes MLP: write fedlit.models.MLP or torchvision.ops.MLP"
    words = ["fit", "--config=data/digits", "--config=methods/fedavg"]
    assert told(*words, "--model.extractor=MLP") == f"fedlit: --model.extractor: {several}"
    Path("b.yaml").write_text("model: {init_args: {extractor: {class_path: MLP}}}")
    assert told(*words, "--config=b.yaml") == f"fedlit: b.yaml: model.init_args.extractor: {several}"


def test_what_fedlit_refuses_in_a_run_is_a_line_and_slips_keep_their_traceback(monkeypatch):
    words = ["fit", "--config=data/heart_disease", "--config=methods/fedavg", "--trainer.max_epochs=2"]
    assert told(*words, "--trainer.max_steps=3").startswith("fedlit: ValueError: max_steps must be the steps of whole")

    def slip(*_: object) -> None:
        int("no number")

    monkeypatch.setattr("fedlit.run.loop.check_modes", slip)
    with pytest.raises(ValueError, match="invalid literal"):
        main(words)


def test_an_option_before_what_it_is_of_is_refused_and_one_that_is_replaced_is_named(capsys):
    first = "--model.mu sets an argument of model, and nothing before it names its class: put --model, or the"
    assert told("fit", "--model.mu=0.5", "--config=data/digits", "--config=methods/fedprox").startswith(
        f"fedlit: {first}"
    )
    missing = "fedlit: --config nowhere.yaml is no file and no installed configuration"
    assert told("predict", "--config=nowhere.yaml", "--data.predict_file=new.csv").startswith(missing)
    Path("a.yaml").write_text(BASE)
    check(normalise(["fit", "--trainer.max_epochs=2", "--config=a.yaml", "--trainer.max_epochs=3"]))
    assert capsys.readouterr().err == (
        "fedlit: --trainer.max_epochs has no effect, as a.yaml after it sets 1: put it behind\n"
    )
    check(normalise(["fit", "--trainer.max_epochs=1", "--config=a.yaml", "--model.optimizer.lr=0.2"]))
    assert capsys.readouterr().err == ""
