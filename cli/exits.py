"""Exit codes of every command, and which error means which (docs/cli.md).

Invariant: an error that a user can act on never ends a command with 1; that is ours to mend.
"""

from delayd.errors import (
    CallerError,
    DamagedData,
    DataError,
    DelaydError,
    OutcomeUnknown,
    ProtocolError,
    RequestFailed,
    RetryLater,
    ServerStopped,
    StaleHandle,
)

OK = 0
BUG = 1  # A traceback is on stderr.
USAGE = 2  # An argument, a setting or the state of a directory; the same command fails again.
NOT_BALANCED = 3  # The books do not balance, data is damaged, or a server stopped itself because of that.
TRY_LATER = 4  # A server can't be reached or asks to wait.
INTERRUPTED = 130  # What a shell reports for a program that Ctrl-C ended.
NOBODY_READS = 141  # What a shell reports for a program whose reader went away, such as `head`.

# The first that fits decides, so the narrower one comes first.
_CODES: tuple[tuple[type[DelaydError], int], ...] = (
    (DamagedData, NOT_BALANCED),
    (ServerStopped, NOT_BALANCED),
    (DataError, USAGE),
    (CallerError, USAGE),
    (ProtocolError, USAGE),  # Whatever listens there does not speak as we do: the address is wrong, or a version.
    (RetryLater, TRY_LATER),
    (RequestFailed, TRY_LATER),
    (OutcomeUnknown, TRY_LATER),
    (StaleHandle, TRY_LATER),
)


def exit_code_of(error: DelaydError) -> int:
    """The exit code that tells a script who must act."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    # An error that bundles others, such as that of a batch, means what its cause means.
    return exit_code_of(error.__cause__) if isinstance(error.__cause__, DelaydError) else BUG
