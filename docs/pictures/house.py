"""Draw `house.svg`, the map for contributors: the rows of `tests/test_architecture.py`, each with its rooms.

python docs/pictures/house.py
"""

import ast
from pathlib import Path

HERE = Path(__file__).parent
ROWS = {  # what a row is for, and of each room what is in it, in the order of the rows
    "commands": {"cli": "one file a command"},
    "checks and pages": {"testing": "check_*, verify_resume, replay", "html_report": "the page of runs"},
    "runs that have ended": {"_runs": "a finished run, read; traces and their first difference"},
    "extensions": {"training.extensions": "one file an extension: LogReport, snapshot, Evaluator, shifts ..."},
    "the loop": {"training": "Trainer, Extension, the life of a run, its settings, its state"},
    "one update": {
        "training.updaters": "Updater, StandardUpdater",
        "training.triggers": "when",
        "parallel": "scatter, gather",
        "nn": "Classifier",
        "writers": "where rows go",
    },
    "batches and values": {
        "reporting": "report, Reporter, means",
        "iterators": "the order of data, workers, loaders",
    },
    "state": {"serializers": "serialize, snapshots, npz; foreign/ reads those of others"},
    "building blocks": {
        "_distributed": "ranks",
        "datasets": "examples",
    },
    "places": {"_places": "directories and object stores"},
    "files": {"_files": "written at once, or only ever longer"},
    "foundations": dict.fromkeys(["_random", "_messages", "_progress", "_checks", "_hints", "_callables", "converters"], ""),
}
LEFT, WIDTH, HEIGHT, GAP, STEP = 170, 670, 58, 12, 72
GRAY = "#57606a"


def draw() -> str:
    """Return the picture."""
    height = 20 + STEP * len(ROWS)
    shapes = []
    for number, (label, rooms) in enumerate(ROWS.items()):
        top = 20 + STEP * number
        shapes.append(f'<text x="{LEFT - 16}" y="{top + 34}" text-anchor="end" fill="{GRAY}" font-size="13">{label}</text>')
        sizes = [max(8 * len(name) + 4, 6.2 * len(caption)) for name, caption in rooms.items()]
        scale = (WIDTH - GAP * (len(rooms) - 1)) / sum(sizes)
        x: float = LEFT
        for size, (name, caption) in zip(sizes, rooms.items(), strict=True):
            wide, middle = size * scale, x + size * scale / 2
            shown = name.replace(".", "/") + "/" * (HERE.parents[1] / "src/chainring" / name.replace(".", "/")).is_dir()
            font = 14 if len(rooms) < 6 else 11
            shapes += [
                f'<rect x="{x:g}" y="{top}" width="{wide:g}" height="{HEIGHT}" rx="8" fill="#f6f8fa" stroke="#8c959f"/>',
                f'<text x="{middle:g}" y="{top + (24 if caption else 34)}" text-anchor="middle" '
                f'font-family="ui-monospace, monospace" font-size="{font}" font-weight="600">{shown}</text>',
            ]
            if caption:
                shapes.append(
                    f'<text x="{middle:g}" y="{top + 44}" text-anchor="middle" font-size="12" fill="{GRAY}">{caption}</text>'
                )
            x += wide + GAP
        if number < len(ROWS) - 1:
            shapes.append(f'<path d="M505 {top + HEIGHT} v11" stroke="{GRAY}" stroke-width="1.5" marker-end="url(#tip)"/>')
    lines = "\n  ".join(shapes)
    title = "The rows of src/chainring: an import points to a lower row, or stays in its package."
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" width="860" \
font-family="system-ui, sans-serif" role="img" aria-labelledby="house-title">
  <title id="house-title">{title}</title>
  <defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M0 0 L8 4 L0 8 Z" fill="{GRAY}"/></marker></defs>
  <rect width="860" height="{height}" fill="#fff"/>
  {lines}
</svg>
"""


def check() -> None:
    """Refuse to draw other rows than those that the code is held to."""
    tree = ast.parse((HERE.parents[1] / "tests" / "test_architecture.py").read_text())
    (held,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROWS"]
    rows = [[name for name in row.split() if name != "_version"] for row in ast.literal_eval(held)]
    assert rows == [list(rooms) for rooms in ROWS.values()], rows


if __name__ == "__main__":
    check()
    (HERE.parent / "house.svg").write_text(draw())
