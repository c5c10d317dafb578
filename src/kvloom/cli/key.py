"""`kvloom key`: keys with names, in a file that gateways read again when it changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from kvloom.cli.app import Whole, print_columns
from kvloom.config.keys import NamedKey, add_key, make_key, read_key_file, remove_key, rotate_key
from kvloom.types.errors import ConfigError

key = App(
    name="key",
    help="Make, show, rotate or revoke keys with names and limits, in the file that a config names as "
    "`keys`.\n\n"
    "A fleet that serves reads the file again within seconds. It holds no key, but of each a digest.",
)

KeyName = Annotated[str, Parameter(help="the key's name, as metrics and the audit trail tell it")]
File = Annotated[Path, Parameter(help="the file of keys")]
Most = Annotated[Whole | None, Parameter(metavar="N", help="the most in a minute (no limit)")]
DEFAULT_FILE: Final = Path("keys.yaml")
_HEAD: Final = ("name", "models", "priority", "requests/min", "tokens/min", "at once", "expires", "")


@key.command
def create(
    name: KeyName,
    /,
    *,
    file: File = DEFAULT_FILE,
    models: Annotated[
        tuple[str, ...], Parameter(metavar="NAME", help="a model that it opens; may be given again (all)")
    ] = (),
    priority: Annotated[
        Whole | None, Parameter(metavar="N", help="the most urgent priority that it gives (any)")
    ] = None,
    requests_per_minute: Most = None,
    tokens_per_minute: Most = None,
    concurrency: Annotated[
        Whole | None, Parameter(metavar="N", help="requests that may run at once (no limit)")
    ] = None,
    expires: Annotated[
        str | None, Parameter(metavar="TIME", help="as 2027-01-31 or 2027-01-31T12:00:00Z (never)")
    ] = None,
    admin: Annotated[bool, Parameter(help="let it administer the fleet")] = False,
) -> None:
    """Make a key and print it, this once. The file gets its digest; it is made if it is not there."""
    given = {
        "models": models or None,
        "priority": priority,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
        "expires": expires,
        "admin": admin or None,
    }
    with _told():
        text, made = make_key(name, **{field: value for field, value in given.items() if value is not None})
        if made.expires is not None and made.expired(time.time()):
            raise ValueError(
                f"--expires: {expires!r} is over; a time to come is right, in UTC or with a zone"
            )
        add_key(file, made)
    print(text)


@key.command(name="list")
def list_keys(file: File = DEFAULT_FILE) -> None:
    """Show the keys of the file, and what each may do."""
    with _told():
        keys = read_key_file(file)
    print_columns([_HEAD, *(_row(one) for one in keys.values())])


@key.command
def revoke(name: KeyName, /, *, file: File = DEFAULT_FILE) -> None:
    """Take a key out of the file. What runs under it ends by itself; it begins nothing any more."""
    with _told():
        remove_key(file, name)


@key.command
def rotate(name: KeyName, /, *, file: File = DEFAULT_FILE) -> None:
    """Give a key another secret and print it, this once. Its limits and what it has used of them stay; the
    key of before opens nothing any more."""
    with _told():
        text = rotate_key(file, name)
    print(text)


def _row(one: NamedKey) -> tuple[str, ...]:
    limits = (one.priority, one.requests_per_minute, one.tokens_per_minute, one.concurrency)
    return (
        one.name,
        "all" if one.models is None else ",".join(one.models),
        *("-" if value is None else str(value) for value in limits),
        "-" if one.expires is None else one.expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
        " ".join(["admin"] * one.admin + ["expired"] * one.expired(time.time())),
    )


@contextmanager
def _told() -> Iterator[None]:
    """Ends the command with what is wrong."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error
