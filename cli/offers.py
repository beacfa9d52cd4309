"""What a shell offers for an argument or an option while somebody types a command line.

Invariant: a command that is run, and not completed, imports nothing for this.
"""

from importlib import import_module
from types import ModuleType

import click

from delayd.address import META_LOCAL
from delayd.config import DATA_DEFAULT


def offer_subjects(context: click.Context, parameter: click.Parameter, begin: str) -> list[str]:
    """Offer subjects."""
    found: list[str] = _names().subjects(_value(context, "meta", META_LOCAL), begin)
    return found


def offer_groups(context: click.Context, parameter: click.Parameter, begin: str) -> list[str]:
    """Offer groups of the subject that was typed before."""
    subject = context.params.get("subject")
    found: list[str] = _names().groups(_value(context, "meta", META_LOCAL), subject, begin)
    return found


def offer_instants(context: click.Context, parameter: click.Parameter, begin: str) -> list[str]:
    """Offer instants."""
    found: list[str] = _names().instants(_value(context, "data", DATA_DEFAULT), begin)
    return found


def _value(context: click.Context, name: str, default: str) -> str:
    value = context.params.get(name)
    return value if isinstance(value, str) else default


def _names() -> ModuleType:
    # Commands name these functions, and none of them needs what asks a server.
    return import_module(".known_names", __package__)
