"""What `import delayd` offers: clients, and each error by its name; docs/api.md has it all."""

import inspect
import sys
from subprocess import run

import pytest

import delayd
from delayd import errors
from tests.api_page import PAGE, SECTIONS, page


def test_every_error_is_importable_from_delayd() -> None:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, delayd.DelaydError)]
    assert len(kinds) > 60
    assert {kind.__name__ for kind in kinds} <= set(errors.__all__)
    for name in errors.__all__:
        assert getattr(delayd, name) is getattr(errors, name)


def test_every_name_that_delayd_offers_is_there_and_named_once() -> None:
    assert len(delayd.__all__) == len(set(delayd.__all__))
    for name in delayd.__all__:
        assert getattr(delayd, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Produser'"):
        _ = delayd.Produser  # type: ignore[attr-defined]


def test_the_page_of_the_api_is_as_the_docstrings_say() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.api_page"
    named = {name for names in SECTIONS.values() for name in names.split()} | {*errors.__all__}
    assert named == {*delayd.__all__} - {"errors", "__version__"}


def test_the_package_alone_loads_no_client_and_no_server() -> None:
    code = "import sys, delayd; print(*sorted(name for name in sys.modules if name.startswith('delayd')))"
    ran = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["delayd", "delayd.errors"]
