"""Pools of processes that run Python functions on devices, and actors."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.pool.actor": ("Actor", "Actors"),
        "anyaccel.pool.dispatcher": ("PROCESSORS", "Broker", "LocalEngine", "broker_of"),
        "anyaccel.pool.call": ("BrokenPoolError", "Call", "GangFuture", "Options", "make_ranked_call"),
        "anyaccel.pool.engine": ("Engine", "PoolSettings", "find_engine"),
        "anyaccel.pool.devices": ("CPU",),
        "anyaccel.pool.messages": ("Pickled", "dumps", "loads"),
        "anyaccel.pool.pool": ("Pool",),
    },
)
