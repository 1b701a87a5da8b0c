"""YAML for ``fedlit fit --config``, installed with the package."""

from __future__ import annotations

import math


def flat(tree: object, prefix: str = "") -> dict[str, object]:
    """Leaves of nested mappings and lists of mappings by dotted key: ``{"a": [{"b": 1}]}`` has ``"a.0.b"``.

    A list without mappings is a leaf, as is what is empty.
    """
    if isinstance(tree, dict) and tree:
        items = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        items = dict(enumerate(tree)).items()
    else:
        return {prefix: tree}
    return {
        key: leaf
        for name, branch in items
        for key, leaf in flat(branch, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def flow(value: object) -> str:
    """YAML in one line, as the command line takes it."""
    import yaml  # where it is not installed yet, the files can be found all the same

    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()
