"""What any cluster needs: the pool's side of it, the hosts on its nodes, and what the two say to each other."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.engines.remote.actor_host": ("ActorHost",),
        "anyaccel.engines.remote.cluster": ("Cluster", "Plan", "RemoteHost", "alike", "last_line", "outcome"),
        "anyaccel.engines.remote.driver": ("Driver", "RemoteCall", "order_of"),
        "anyaccel.engines.remote.fitting": ("Fitting", "find_fitting", "listed"),
        "anyaccel.engines.remote.host": ("NodeAdapter", "end_host", "loaded", "pickled", "run"),
        "anyaccel.engines.remote.messages": ("Answer", "Order", "PoolSpec", "Started"),
    },
)
