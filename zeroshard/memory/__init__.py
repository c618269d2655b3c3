"""What a rank holds: counted while it runs (ledger.py), and known beforehand (estimate.py)."""

from .estimate import estimate
from .ledger import Bytes, Ledger

__all__ = ["Bytes", "Ledger", "estimate"]
