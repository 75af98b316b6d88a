"""The kernel: processes and their trees, marks, descriptors, users, inotify, Landlock, cgroups."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.linux.descriptors": ("list_descriptors", "list_hardware", "open_devices"),
        "anyaccel.linux.files": ("write_whole",),
        "anyaccel.linux.process": ("pid_namespace",),
        "anyaccel.linux.system": ("call",),
        "anyaccel.linux.teardown": (
            "GRACE_SECONDS",
            "Visit",
            "Teardown",
            "combine_finds",
            "find_carriers",
            "find_tree",
            "describe_left",
        ),
    },
)
__all__ += ["mark", "process", "users"]
