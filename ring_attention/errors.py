"""Everything this package raises on purpose."""


class RingError(Exception):
    """Base of all errors of `ring_attention`."""


class UsageError(RingError, ValueError):
    """The call cannot be answered exactly as it stands; the text says what to change."""


class DivergenceError(RingError):
    """The ranks of one group asked for different things. Raised on every rank, naming ranks and what differs."""


class PeerError(RingError):
    """A rank of the group died or did not answer within the group's timeout."""
