"""What a flag, a file or a request can cause. Everything else is a bug and shows as a traceback under --debug."""

from __future__ import annotations


class LlmxError(Exception):
    """One sentence with the numbers; `hint` says what to do about it. The command line exits with `exit_code`."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(LlmxError):
    """A wrong flag, or a file that can't be used as it is."""

    exit_code = 2


class CheckFailed(LlmxError):
    """A check that the user asked for did not hold (`--fail-if` and the like)."""

    exit_code = 3


class RequestError(UsageError):
    """A request that can't be run as asked. `status`, `param` and `code` are those of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.param = param
        self.code = code
        self.status = status
