"""Errors that a client gets instead of an answer."""

from __future__ import annotations


class CallRefused(Exception):
    """A call that is answered with a status other than 200.

    Attributes:
        status: HTTP status.
        kind: Error type, from which SDKs choose their exception.
        code: Error code, by which agents recognize the error.
    """

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code if code is not None else self.code


class BadRequest(CallRefused):
    """The request is invalid, or asks for something unsupported."""


class TooLong(CallRefused):
    """The prompt is longer than allowed. Agents that compact their history recognize the code."""

    code = "context_length_exceeded"


class TooLarge(CallRefused):
    """The body is larger than allowed."""

    status = 413
    kind = "request_too_large"


class UnknownRollout(CallRefused):
    """The secret belongs to no running rollout."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(CallRefused):
    """The rollout reached a limit, or the request comes from outside. Not 429, because SDKs retry that."""

    status = 403
    kind = "permission_error"


class NotFound(CallRefused):
    """The path does not exist."""

    status = 404
    kind = "not_found_error"


class CallFault(CallRefused):
    """The engine, the parser or the gateway failed. The rollout fails even if the agent handles the error."""

    status = 500
    kind = "server_error"


class Busy(CallFault):
    """The engine stayed unavailable through all of the run's retries."""

    status = 503
    kind = "overloaded_error"
