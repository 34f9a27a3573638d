"""Draw `mesh.svg`: eight ranks as a mesh of four that share the data by two that compute one model together.

    python docs/pictures/mesh.py

The page includes it as HTML, so that it takes the colours of the page, light or dark.
"""

from pathlib import Path

SHARES, PARTS = 4, 2  # mesh = init_device_mesh(device, (SHARES, PARTS), mesh_dim_names=("dp", "tp"))
WIDTH, HEIGHT, LEFT, TOP = 92, 62, 74, 66


def draw() -> str:
    """Return the picture."""
    right, bottom = LEFT + SHARES * (WIDTH + 12), TOP + PARTS * HEIGHT + 12
    boxes, chips, texts = [], [], []
    for share in range(SHARES):
        x = LEFT + share * (WIDTH + 12)
        middle = x + WIDTH / 2
        boxes.append(f'<rect x="{x}" y="{TOP}" width="{WIDTH}" height="{PARTS * HEIGHT + 6}" rx="8"/>')
        texts.append(f'<text x="{middle:g}" y="{TOP - 12}">batch[{share}::{SHARES}]</text>')
        texts.append(f'<text x="{middle:g}" y="{bottom + 12}">one model</text>')
        for part in range(PARTS):
            y = TOP + 10 + part * HEIGHT
            chips.append(f'<rect x="{x + 8}" y="{y}" width="{WIDTH - 16}" height="{HEIGHT - 16}" rx="8"/>')
            texts.append(f'<text x="{middle:g}" y="{y + 28}">rank {share * PARTS + part}</text>')
    rows = [
        f'<text x="{LEFT - 12}" y="{TOP + 38 + part * HEIGHT}" text-anchor="end">part {part}</text>' for part in range(PARTS)
    ]
    center = (LEFT + right) / 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 4} {bottom + 62}" class="data-flow" role="img" '
            'aria-labelledby="mesh-title" fill="none" stroke="currentColor" font-family="inherit" font-size="14">',
            f'  <title id="mesh-title">{SHARES * PARTS} ranks in {SHARES} columns of {PARTS}. Each column computes one '
            f"model on one of {SHARES} shares of the batch; each rank of a column holds a part of the matrices.</title>",
            '  <g class="box">', *(f"    {each}" for each in boxes), "  </g>",
            '  <g class="chip">', *(f"    {each}" for each in chips), "  </g>",
            '  <g stroke="none" fill="currentColor" text-anchor="middle">',
            *(f"    {each}" for each in [*texts, *rows]),
            f'    <text x="{center:g}" y="18">mesh["dp"]: {SHARES} shares of every batch</text>',
            f'    <text x="{center:g}" y="{bottom + 46}">mesh["tp"]: the {PARTS} ranks of a column, same rows</text>',
            "  </g>",
            f'  <path d="M{LEFT} 30 H{right - 12}"/>',
            "</svg>",
            "",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    Path(__file__).with_name("mesh.svg").write_text(draw())
