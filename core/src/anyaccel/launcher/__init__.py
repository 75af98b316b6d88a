"""Leases of devices, environments of workers, and the start of commands."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.launcher.containers": ("container", "merge_edits"),
        "anyaccel.launcher.environment": (
            "DEVICES_VARIABLE",
            "worker_environment",
        ),
        "anyaccel.launcher.hold": ("DeviceLease", "acquire", "take_async"),
        "anyaccel.launcher.launch": ("AcquireOptions", "Launch"),
        "anyaccel.launcher.monitor": ("end_in_time",),
        "anyaccel.launcher.rendezvous": ("Rendezvous", "make_rank_variables"),
        "anyaccel.launcher.schedulers": ("count_capacity",),
        "anyaccel.launcher.start": (
            "JOB_NAME",
            "become",
            "check_program",
            "fork_child",
            "make_start_error",
            "reap_helpers",
            "start_detached",
        ),
        "anyaccel.launcher.scope": ("Scope",),
        "anyaccel.launcher.use": ("get_process_lease", "refuse_if_loaded"),
    },
)
__all__ += ["time_limit"]
