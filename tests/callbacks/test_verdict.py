"""What a report says by the target's hidden labels, on numbers worked out by hand."""

from __future__ import annotations

import html
import re

from fedlit.callbacks import RunSummary
from fedlit.callbacks.report.charts import confusion, dots, points, reliability, shares
from fedlit.callbacks.report.pages import Bullets, Pictures
from fedlit.callbacks.report.verdict import verdict
from fedlit.callbacks.summary import closing_table
from summaries import summary as run


def lines(runs: list[RunSummary]) -> list[str]:
    return [line for block in verdict(runs) if isinstance(block, Bullets) for line in block.lines]


def test_differences_and_their_spread_are_those_by_hand():
    """FedMMD is 2 and 4 points above on dslr, 4 and 6 on webcam: 3 and 5 on average, 4 ± 1.4. FedAvg harms dslr."""
    floor = {"dslr": (0.5, 0.6), "webcam": (0.7, 0.8)}
    gains = {"FedMMD": {"dslr": (2, 4), "webcam": (4, 6)}, "FedAvg": {"dslr": (-3, -4), "webcam": (11, -2)}}
    runs = [
        run("SourceOnly", target, accuracy, seed)
        for target, each in floor.items()
        for seed, accuracy in enumerate(each)
    ]
    for method, by_target in gains.items():
        for target, some in by_target.items():
            runs += [run(method, target, floor[target][s] + gain / 100, s) for s, gain in enumerate(some)]
    assert lines(runs) == [
        "ORACLE: FedMMD - SourceOnly is +4.0 ± 1.4 points on average over 2 targets, over 2 seeds: more than two "
        "standard deviations.",
        "ORACLE: FedAvg - SourceOnly is +0.5 ± 4.9 points on average over 2 targets, over 2 seeds: not more than two "
        "standard deviations, chance may have made it.",
        "ORACLE: worse than SourceOnly, which adapts nothing: FedAvg on dslr (-3.5 ± 0.7).",
    ]


def test_one_seed_says_nothing_about_chance_and_what_is_not_known_is_left_out():
    runs = [run(name, "dslr", each, target_score=None) for name, each in (("SourceOnly", 0.5), ("FedMMD", 0.75))]
    assert lines(runs) == [
        "ORACLE: FedMMD - SourceOnly is +25.0 points on dslr, of one seed, which shows nothing about chance."
    ]
    assert lines([run("FedAvg", "dslr", None, target_score=None)]) == []


def test_no_method_is_named_first_by_hidden_labels_or_by_a_score_of_single_methods():
    scores = {"SourceOnly": (0.55, 0.80), "FedAvg, 50 target labels": (0.62, 0.82), "FedAvg, refined": (0.79, 0.23)}
    runs = [
        run(name, "fonts", accuracy, seed, target_score=score)
        for name, (accuracy, score) in scores.items()
        for seed in (0, 1)
    ]
    blocks = verdict(runs)
    assert [type(block) for block in blocks] == [Bullets, Pictures]
    assert not any(re.search("best|first|next|level", line) for line in lines(runs))
    assert all(line.startswith("ORACLE") for line in lines(runs))
    titles = [picture.caption for block in blocks if isinstance(block, Pictures) for picture in block.pictures]
    assert titles == ["accuracy in % of the target (ORACLE)"]


def test_methods_are_compared_on_targets_and_seeds_that_they_share():
    """The floor alone has all targets; seed 1 of it, .1, would make FedAvg's .3 the better."""
    floor = [run("SourceOnly", "fonts", 0.4, 0), run("SourceOnly", "fonts", 0.1, 1), run("SourceOnly", "noisy", 0.9, 0)]
    (difference,) = lines([*floor, run("FedAvg", "fonts", 0.3, 0)])
    assert difference.startswith("ORACLE: FedAvg - SourceOnly is -10.0 points on fonts alone, of one seed")
    apart = [run("SourceOnly", "fonts", 0.4, 0), run("FedAvg", "fonts", 0.3, 1)]
    (note,) = lines(apart)
    assert "no target, seed and samples in common" in note


def test_accuracy_and_r2_are_never_compared():
    runs = [run("SourceOnly", "dslr", 0.5, target_score=None), run("FedAvg", "dslr", None, oracle_r2=0.7)]
    assert lines(runs) == []
    titles = [picture.caption for block in verdict(runs) if isinstance(block, Pictures) for picture in block.pictures]
    assert titles[:2] == ["accuracy in % of the target (ORACLE)", "R2 in % of the target (ORACLE)"]


def test_the_notes_of_the_closing_table_have_the_same_differences():
    """On seeds that both have: 3 and 5 points on dslr at seeds 0 and 1, 1 on webcam at seed 0."""
    floor = [run("SourceOnly", "dslr", 0.5, seed) for seed in (0, 1, 2)] + [run("SourceOnly", "webcam", 0.5)]
    own = [run("FedMMD", "dslr", 0.53), run("FedMMD", "dslr", 0.55, 1), run("FedMMD", "webcam", 0.51)]
    (note,) = [note for note in closing_table([*floor, *own]).footnotes if " - " in note and "privacy" not in note]
    assert note == "FedMMD - SourceOnly: +2.0 points on average (dslr +4.0, webcam +1.0)"
    assert "FedMMD - SourceOnly is +2.0 points on average over 2 targets, of one seed" in lines([*floor, *own])[0]


def test_pictures_have_what_they_are_given():
    drawn = dots("t", ["dslr", "<b>"], {"A": [[10.0, 20.0], [30.0]], "B": [[], [15.0]]}, "unit")
    texts = [html.unescape(each) for each in re.findall("<text[^>]*>(.*?)</text>", drawn)]
    assert {"dslr", "<b>", "15.0", "30.0", "unit", "A", "B"} <= set(texts)
    matrix = confusion("t", ["a", "b"], [[3, 1], [0, 0]])
    assert re.findall("<text[^>]*>([^<]*)</text>", matrix)[1:4] == ["a", "3", "1"]
    reliable = reliability("t", {"A": [[0, 0.0, 0.0], [4, 0.5, 1.0]]})
    assert len(re.findall('stroke-linecap="round"', reliable)) == 1  # an empty bin has no dot
    assert len(re.findall("<rect", shares("t", ["a", "b"], {"A": [1, 3]}, [2, 2]))) == 2
    samples = {"s": [(0.0, 0.0)], "t": [(1.0, 1.0), (2.0, 0.5)]}
    assert points("t", samples, {"s": [0], "t": [0, 1]}, ["a", "b"], "t").count("h0") == 3
