"""Errors of communication between ranks."""


class PeerError(RuntimeError):
    """A message was not delivered; names the ranks, the edge and the step."""


class RemoteError(RuntimeError):
    """An error on another rank; the message is that rank's own."""
