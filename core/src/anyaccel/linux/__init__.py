"""The kernel: processes and their trees, marks, descriptors, users, inotify, Landlock, cgroups. Nothing of ours."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.linux.descriptors": ("list_descriptors",),
        "anyaccel.linux.files": ("write_whole",),
        "anyaccel.linux.process": ("pid_namespace",),
        "anyaccel.linux.teardown": (
            "GRACE_SECONDS",
            "Confirm",
            "Tell",
            "Teardown",
            "find_all",
            "find_carriers",
            "find_tree",
            "tell_left",
        ),
    },
)
__all__ += ["mark", "process"]
