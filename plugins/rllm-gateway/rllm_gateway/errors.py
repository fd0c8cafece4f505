"""What a client is told when a call has no answer."""

from __future__ import annotations


class Refused(Exception):
    """A call that gets a status other than 200.

    Attributes:
        status: HTTP status.
        kind: Type of the error, by which SDKs choose their exception.
        code: Code of the error, by which agents recognize it.
    """

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code if code is not None else self.code


class BadRequest(Refused):
    """The request is wrong, or asks for something that is not supported."""


class TooLong(Refused):
    """The prompt is longer than allowed. Agents that compact their history recognize the code."""

    code = "context_length_exceeded"


class TooLarge(Refused):
    """The body is larger than allowed."""

    status = 413
    kind = "request_too_large"


class UnknownRollout(Refused):
    """The secret belongs to no running rollout."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(Refused):
    """A limit of the rollout is reached, or the request comes from elsewhere. Not 429, which SDKs repeat."""

    status = 403
    kind = "permission_error"


class NotFound(Refused):
    """There is no such path."""

    status = 404
    kind = "not_found_error"


class Failed(Refused):
    """The engine, the parser or the gateway failed. The rollout fails, whatever the agent makes of it."""

    status = 500
    kind = "server_error"


class Busy(Failed):
    """The engine was unavailable, for longer than the run repeats its requests."""

    status = 503
    kind = "overloaded_error"
