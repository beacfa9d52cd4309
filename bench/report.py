"""``python -m bench.report FILE``: put the results of ``python -m bench > FILE`` into the pages that tell them.

The table and the plots stand between two comments in docs/performance.md, a shorter table in README.md; a page without
the comments is left as it is. Plots are docs/plots/*.png.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.plots import draw_all
from bench.results import Result, read_results
from bench.table import full_table, headline_table

PAGES = {"docs/performance.md": full_table, "README.md": headline_table}
PLOTS = "docs/plots"
BEGIN, END = "<!-- figures: begin (python -m bench.report writes what follows) -->", "<!-- figures: end -->"


def main() -> int:
    """Write what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description="Tell results in the docs.")
    parser.add_argument("file", type=Path, help="what `python -m bench` printed")
    parser.add_argument("--folder", type=Path, default=Path("."), help="the repository (default: here)")
    arguments = parser.parse_args()
    with arguments.file.open() as lines:
        results = read_results(lines)
    if not results:
        parser.error(f"{arguments.file} has no result of a whole case")
    for path in report(results, arguments.folder):
        print(path)
    return 0


def report(results: Mapping[str, Result], folder: Path) -> list[Path]:
    """Write tables and plots; the files that were written."""
    written = draw_all(results, folder / PLOTS)
    pictures = [path.stem for path in written]
    for name, table in PAGES.items():
        page = folder / name
        if not page.exists():
            continue
        text = page.read_text()
        told = fill_in(text, "\n".join([table(results), *_pictures(name, pictures)]))
        if told != text:
            page.write_text(told)
            written.append(page)
    return written


def fill_in(text: str, told: str) -> str:
    """The page with this text between its two comments; the page as it is when it has no comments."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{told}\n{end}{after}" if begin and end else text


def _pictures(page: str, names: list[str]) -> list[str]:
    """Links from the page's own folder; the README shows the first two."""
    if page == "README.md":
        names, folder = names[:2], PLOTS
    else:
        folder = "plots"
    return ["", *(f"![{name}]({folder}/{name}.png)" for name in names)]


if __name__ == "__main__":
    sys.exit(main())
