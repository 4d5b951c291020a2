"""Redis: leases, sessions and load, and who waits for what."""

from rollstream.core.store.keys import Keys
from rollstream.core.store.progress import Progress, ProgressLeases
from rollstream.core.store.redis import EvictingStore, Store, StoreUnavailable
from rollstream.core.store.registry import Lease, Registry, Role, State
from rollstream.core.store.sessions import Choice, Sessions

__all__ = [
    "Choice",
    "EvictingStore",
    "Keys",
    "Lease",
    "Progress",
    "ProgressLeases",
    "Registry",
    "Role",
    "Sessions",
    "State",
    "Store",
    "StoreUnavailable",
]
