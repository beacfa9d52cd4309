"""The pages tell the truth: every stop of the data path, every linked page and every named source file exists."""

import re
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

from delayd.programs import find

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
STOPS = re.findall(r"`([\w.]+):([\w.]+)` \|$", README, re.MULTILINE)
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"]


def test_the_data_path_has_its_stops() -> None:
    assert len(STOPS) == 12


@pytest.mark.parametrize(("module", "name"), STOPS)
def test_each_stop_of_the_data_path_exists(module: str, name: str) -> None:
    # The page names modules as they are installed: those of `realtime` lie inside of `delayd` then.
    inside = module.removeprefix("delayd.")
    found = find(inside) if inside.partition(".")[0] == "realtime" else import_module(module)
    assert callable(reduce(getattr, name.split("."), found))


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/deploy.md"], ids=lambda page: page.name)
def test_a_page_names_the_pythons_that_are_tested(page: Path) -> None:
    *others, last = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert f"Python {', '.join(others)} or {last}" in page.read_text(), "`make pythons` runs on those of pyproject.toml"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_to_a_page_of_ours_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_source_file_that_a_page_names_exists(page: Path) -> None:
    for named in re.findall(
        r"`((?:delayd|realtime|meta|cli|spark|tests|bench|examples)/[\w/]+\.\w+)`", page.read_text()
    ):
        assert (ROOT / named).exists(), f"{page.name} names {named}"
