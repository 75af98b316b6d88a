"""Leases that every process on this machine shares: a lease is a file that its holder keeps locked."""

from anyaccel.ledger.acquisition import Choose, OnWait
from anyaccel.ledger.lease import Lease, Place, Want
from anyaccel.ledger.ledger import Ledger
from anyaccel.ledger.record import LeaseRecord, TicketRecord

__all__ = ["Choose", "Lease", "LeaseRecord", "Ledger", "OnWait", "Place", "TicketRecord", "Want"]
