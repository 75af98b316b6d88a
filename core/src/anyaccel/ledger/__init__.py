"""Leases that every process on this machine shares: a lease is a file that its holder keeps locked."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.ledger.acquisition": ("Acquisition", "Choose", "OnWait"),
        "anyaccel.ledger.directory": ("find",),
        "anyaccel.ledger.lease": ("Lease", "Place", "Want"),
        "anyaccel.ledger.ledger": ("Ledger",),
        "anyaccel.ledger.machine_policy": ("DeviceBlock",),
        "anyaccel.ledger.entries": ("boot", "without_scope"),
        "anyaccel.ledger.record": ("BLOCKED", "LeaseRecord", "TicketRecord"),
    },
)
__all__ += ["journal"]
