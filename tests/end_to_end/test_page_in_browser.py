"""The page of an audit in a browser without a window: light, dark, on a phone and on paper."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from tests.unit.reading.report_books import PAGE

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), "")
pytestmark = [
    pytest.mark.skipif(not BROWSER, reason="no Chromium is installed here, so nobody looks at the page"),
    pytest.mark.timeout(300),
]
DEADLINE_S = 90
DARK = "--blink-settings=preferredColorScheme=0"


def browse(folder: Path, *options: str) -> str:
    """Show the page; what the browser complains of."""
    command = (BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
    profile = f"--user-data-dir={folder / 'profile'}"
    done = subprocess.run(
        (*command, profile, *options, PAGE.as_uri()), capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return done.stderr


def picture(folder: Path, width: int, *options: str) -> NDArray[np.float32]:
    """A picture of the top of the page, as wide as a window: float32[rows, columns, 3]."""
    path = folder / "page.png"
    said = browse(folder, f"--window-size={width},1600", f"--screenshot={path}", *options)
    # The policy of the page forbids scripts, styles and pictures of others; it must not forbid what the page needs.
    assert "Content Security Policy" not in said and "CONSOLE" not in said, said
    found: NDArray[np.float32] = imread(path)[:, :, :3]
    return found


def test_the_page_is_drawn_in_light_and_in_dark(tmp_path: Path) -> None:
    light, dark = picture(tmp_path, 1100), picture(tmp_path, 1100, DARK)
    assert light[2, 2].min() > 0.95 and dark[2, 2].max() < 0.2
    for drawn in (light, dark):
        # Below the heading stands the verdict, in red: a bar at its left, and a paler ground.
        reds = (drawn[:, :, 0] > drawn[:, :, 1] + 0.3) & (drawn[:, :, 0] > drawn[:, :, 2] + 0.2)
        rows = np.flatnonzero(reds[:, :200].sum(axis=1) > 4)
        assert len(rows) > 60 and rows[0] < 400
        assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 50


def test_a_phone_shows_the_page_without_anything_beside_it(tmp_path: Path) -> None:
    drawn = picture(tmp_path, 500)
    ground = drawn[2, 2]
    # What did not fit would reach the right edge.
    assert np.allclose(drawn[:, -8:], ground, atol=0.02)
    assert not np.allclose(drawn[:, 20:100], ground, atol=0.02)


def test_paper_has_some_pages_with_the_numbers_of_the_charts(tmp_path: Path) -> None:
    path = tmp_path / "page.pdf"
    browse(tmp_path, f"--print-to-pdf={path}", "--no-pdf-header-footer")
    assert path.read_bytes().startswith(b"%PDF-") and 3 <= path.read_bytes().count(b"/Type /Page\n") <= 8
