"""Pools of processes that run Python functions on devices, and actors."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.pool.actor": "Actor ActorGroup ActorState Actors",
        "anyaccel.pool.call": "BrokenPoolError Call GangFuture Options make_ranked_call read_exception set_outcome",
        "anyaccel.pool.devices": "CPU",
        "anyaccel.pool.dispatcher": "PROCESSORS Broker LocalEngine broker_of",
        "anyaccel.pool.engine": "Engine PoolSettings find_engine",
        "anyaccel.pool.messages": "Message MessageKind Pickled dumps dumps_error dumps_whole loads",
        "anyaccel.pool.pool": "Pool",
        "anyaccel.pool.reactor": "find_reactor",
    },
)
