"""The kernel: processes and their trees, marks, descriptors, users, inotify, Landlock, cgroups."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.linux.cgroup": "UnavailableError WorkerGroup",
        "anyaccel.linux.descriptors": (
            "has_lock list_descriptors list_hardware list_mapped lock_owner open_devices open_files touched_devices"
        ),
        "anyaccel.linux.files": "write_whole",
        "anyaccel.linux.fork": "hold_while_forking renew_in_child tidy_in_child",
        "anyaccel.linux.groups": "group_inode is_populated",
        "anyaccel.linux.inotify": "FileEvents",
        "anyaccel.linux.landlock": "Node node_of",
        "anyaccel.linux.mark": "Mark",
        "anyaccel.linux.process": (
            "UNSEEN adopt_orphans children describe_end die_with_parent pid_namespace set_name start_time waits_in"
        ),
        "anyaccel.linux.system": "call signal",
        "anyaccel.linux.teardown": (
            "GRACE_SECONDS KILL_SECONDS Teardown Visit combine_finds describe_left find_carriers find_tree"
        ),
        "anyaccel.linux.users": "find_group find_groups find_user group_name user_name",
    },
)
__all__ += ["mark", "process", "users"]
