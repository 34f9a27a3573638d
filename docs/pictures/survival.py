"""Draw `survival.svg`: eight virtual ranks as three machines have them, and as two do when one was lost.

    python docs/pictures/survival.py

The page includes it as HTML, so that it takes the colours of the page, light or dark.
"""

from pathlib import Path

COUNT, MACHINES, LOST = 8, 3, 1  # virtual ranks, machines with a rank each, and which of them is lost
STEP, LEFT, HEIGHT, BETWEEN = 40, 92, 84, 124


def draw() -> str:
    """Return the picture."""
    boxes, chips, texts = [], [], []
    room = COUNT // (MACHINES - 1) * STEP + 12  # the largest block
    for row, (title, ranks) in enumerate([("before", [0, 1, 2]), ("after", [0, None, 1])]):
        top, size = 26 + row * BETWEEN, len(ranks) - ranks.count(None)
        texts.append(f'<text x="{LEFT - 14}" y="{top + HEIGHT / 2 + 5:g}" text-anchor="end">{title}</text>')
        for machine, rank in enumerate(ranks):
            x = LEFT + machine * (room + 14)
            dashes = ' stroke-dasharray="4 4"' if rank is None else ""
            boxes.append(f'<rect x="{x}" y="{top}" width="{room}" height="{HEIGHT}" rx="8"{dashes}/>')
            name = "lost" if rank is None else f"rank {rank}"
            texts.append(f'<text x="{x + room / 2:g}" y="{top + 24}">{name}</text>')
            block = [] if rank is None else range(rank * COUNT // size, (rank + 1) * COUNT // size)
            start = x + (room - len(block) * STEP) / 2
            for place, virtual in enumerate(block):
                middle = start + place * STEP + STEP / 2
                chips.append(f'<circle cx="{middle:g}" cy="{top + 56}" r="16"/>')
                texts.append(f'<text x="{middle:g}" y="{top + 61}">{virtual}</text>')
    right, bottom = LEFT + MACHINES * (room + 14), 26 + BETWEEN + HEIGHT
    names = [f'<text x="{LEFT + n * (room + 14) + room / 2:g}" y="16">machine {n + 1}</text>' for n in range(MACHINES)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {bottom + 8}" class="data-flow" role="img" '
            'aria-labelledby="survival-title" fill="none" stroke="currentColor" font-family="inherit" font-size="14">',
            '  <title id="survival-title">Eight virtual ranks. Before, machine 1 has rank 0 with the virtual ranks 0 and 1, '
            "machine 2 has rank 1 with 2 to 4, machine 3 has rank 2 with 5 to 7. After machine 2 was lost, rank 0 has 0 to "
            "3, and machine 3 is rank 1, with 4 to 7.</title>",
            '  <g class="box">', *(f"    {each}" for each in boxes), "  </g>",
            '  <g class="chip">', *(f"    {each}" for each in chips), "  </g>",
            '  <g stroke="none" fill="currentColor" text-anchor="middle">',
            *(f"    {each}" for each in [*names, *texts]),
            "  </g>",
            "</svg>",
            "",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    Path(__file__).with_name("survival.svg").write_text(draw())
