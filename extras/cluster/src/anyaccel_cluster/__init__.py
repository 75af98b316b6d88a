"""Common parts of cluster engines: the pool's side, the hosts on the nodes, and the messages between."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel_cluster.cluster": (
            "Answer Cluster Fitting Order Plan PoolSpec RemoteHost Started describe_nodes find_fitting get_outcome "
            "last_line without_durations"
        ),
        "anyaccel_cluster.driver": "Driver RemoteCall make_order",
        "anyaccel_cluster.host": "ActorHost NodeAdapter close_host load_cached run_call",
    },
)
