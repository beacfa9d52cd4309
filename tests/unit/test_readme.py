"""The pages tell the truth: every linked page and section and every named source file exists, and indexes are whole."""

import re
from collections import Counter
from pathlib import Path

import pytest

import delayd
from tests.conformance.public.surface import methods_of

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("docs/**/*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "examples/README.md")),
]
CLIENTS = ("Producer", "Consumer", "Message", "MessageBatch", "Admin")
INDEXES = sorted(ROOT.glob("docs/**/README.md"))
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]+))?\)")


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/deploy.md"], ids=lambda page: page.name)
def test_a_page_names_the_pythons_that_are_tested(page: Path) -> None:
    *others, last = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert f"Python {', '.join(others)} or {last}" in page.read_text(), "`make pythons` runs on those of pyproject.toml"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_to_a_page_of_ours_leads_somewhere(page: Path) -> None:
    for target, section in LINK.findall(page.read_text()):
        place = page.parent / target if target else page
        assert place.exists(), f"{page.name} links to {target}"
        if section:
            assert section in _sections(place), f"{page.name} links to {target}#{section}"


@pytest.mark.parametrize("index", INDEXES, ids=lambda page: str(page.relative_to(ROOT)))
def test_an_index_names_each_page_of_its_folder_once(index: Path) -> None:
    told = Counter(target for target, section in LINK.findall(index.read_text()) if not section)
    pages = [page for page in index.parent.glob("*.md") if page != index]
    pages += index.parent.glob("*/README.md")
    wrong = {name: told[name] for page in pages if told[name := str(page.relative_to(index.parent))] != 1}
    assert not wrong, f"{index} names these pages so often: {wrong}"


def _sections(page: Path) -> set[str]:
    """The names by which links find the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_source_file_that_a_page_names_exists(page: Path) -> None:
    for named in re.findall(
        r"`((?:delayd|realtime|meta|cli|spark|tests|bench|examples)/[\w/]+\.\w+)`", page.read_text()
    ):
        assert (ROOT / named).exists(), f"{page.name} names {named}"


def test_examples_that_run_on_one_set_of_servers_meet_no_messages_of_another_page() -> None:
    pages = ["README.md", *(f"docs/{name}.md" for name in ("admin", "clients", "consuming", "worker"))]
    found = {
        page: {
            subject
            for example in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
            for subject in re.findall(r'"([a-z]+(?:\.[a-z*>]+)+)"', example)
        }
        for page in pages
    }
    assert all(found.values())
    told = Counter(subject for subjects in found.values() for subject in subjects)
    assert not [subject for subject, count in told.items() if count > 1]


@pytest.mark.parametrize("client", [*CLIENTS, *(f"Async{name}" for name in CLIENTS)])
def test_each_method_of_a_client_stands_in_a_page_besides_the_reference(client: str) -> None:
    pages = "".join(page.read_text() for page in ROOT.glob("docs/*.md") if page.name != "api.md")
    missing = [name for name, _ in methods_of(getattr(delayd, client)) if not re.search(rf"\b{name}\b", pages)]
    assert not missing
