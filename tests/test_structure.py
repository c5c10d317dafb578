"""The shape of the source: no circle of imports, no folder that nobody can overlook."""

from __future__ import annotations

from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

import kvloom

SOURCE = Path(kvloom.__path__[0])


def test_no_modules_import_each_other_in_a_circle_also_not_for_types_alone() -> None:
    graph = grimp.build_graph("kvloom")
    modules = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(modules).prepare()  # raises CycleError, which names the circle


def test_a_folder_has_at_most_15_files() -> None:
    files = Counter(file.parent for file in SOURCE.rglob("*.py") if file.stat().st_size > 200)
    assert {str(folder.relative_to(SOURCE)): count for folder, count in files.items() if count > 15} == {}
