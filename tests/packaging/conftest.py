"""The distributions as they are built from the repository, and environments that have nothing but what they ask for."""

import sys
import sysconfig
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.commands import REPOSITORY, build, run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel."""
    return build(REPOSITORY, "--wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution."""
    return build(REPOSITORY, "--sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="session")
def environment(wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and what it requires, from this one's site-packages."""
    return make_environment(tmp_path_factory.mktemp("environment"), wheel, requirements(metadata))


@pytest.fixture(scope="session")
def spark_environment(wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the extra `spark`."""
    return make_environment(tmp_path_factory.mktemp("spark"), wheel, requirements(metadata, "spark"))


@pytest.fixture(scope="session")
def gateway_environment(wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the extra `gateway`."""
    return make_environment(tmp_path_factory.mktemp("gateway"), wheel, requirements(metadata, "gateway"))


def requirements(metadata: Message, *extras: str) -> list[Requirement]:
    """What a distribution requires, with its extras."""
    listed = map(Requirement, metadata.get_all("Requires-Dist", []))
    return [each for each in listed if applies(each, extras)]


def make_environment(folder: Path, wheel: Path | None, required: list[Requirement]) -> Path:
    """Install a wheel, if any, into a new environment, and link to what it requires, and what that requires."""
    venv.create(folder, with_pip=False)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    if wheel is not None:
        run(sys.executable, "-m", "pip", "--python", str(folder), "install", "--no-deps", "--no-index", str(wheel))
    done: set[str] = set()
    while required:
        each = required.pop()
        if each.name not in done:
            done.add(each.name)
            found = distribution(each.name)
            assert each.specifier.contains(found.version), f"{each} is asked for, {found.version} is here"
            link(found, own)
            required += [more for more in map(Requirement, found.requires or []) if applies(more, each.extras)]
    return folder


def link(found: Distribution, folder: Path) -> None:
    """Link to each file and package that a distribution has in its site-packages."""
    for name in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
        if not (folder / name).exists():
            (folder / name).symlink_to(Path(str(found.locate_file(name))))


def applies(required: Requirement, extras: "tuple[str, ...] | set[str]") -> bool:
    """Whether a requirement holds here, with some extras."""
    marker = required.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))
