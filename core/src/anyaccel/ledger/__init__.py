"""Leases that every process on this machine shares: a lease is a file that its holder keeps locked."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.ledger.acquisition": "IMPATIENT_SECONDS Acquisition Choose OnWait",
        "anyaccel.ledger.diagnosis": "diagnose",
        "anyaccel.ledger.directory": "find is_named",
        "anyaccel.ledger.entries": "Tenure boot device_name make_tenure vendor_and_id without_scope",
        "anyaccel.ledger.journal": "IDLE_BELOW JournalEntry Used count_half_life",
        "anyaccel.ledger.lease": "DeviceLock Lease Place Want",
        "anyaccel.ledger.ledger": "Ledger",
        "anyaccel.ledger.machine_policy": "DeviceBlock make_block unknown_names",
        "anyaccel.ledger.record": "BLOCKED LeaseRecord TicketRecord describe_ahead describe_block describe_obstacles",
    },
)
__all__ += ["journal"]
