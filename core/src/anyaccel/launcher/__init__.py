"""Leases of devices, environments of workers, and the start of commands."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.launcher.behalf": ("LeaseOnBehalf", "acquire_on_behalf", "find_on_behalf"),
        "anyaccel.launcher.command": ("run",),
        "anyaccel.launcher.environment": (
            "DEVICES_VARIABLE",
            "WorkerEnvironment",
            "container",
            "merge_edits",
            "worker_environment",
        ),
        "anyaccel.launcher.hold": ("DeviceLease", "acquire", "acquire_async", "take_async"),
        "anyaccel.launcher.launch": ("Launch", "prepare"),
        "anyaccel.launcher.monitor": ("end_in_time",),
        "anyaccel.launcher.options": ("AcquireOptions", "StartOptions"),
        "anyaccel.launcher.rendezvous": ("Rendezvous", "make_rank_variables"),
        "anyaccel.launcher.choosing": ("KnownNames", "count_capacity", "validate"),
        "anyaccel.launcher.schedulers": ("open_scheduler",),
        "anyaccel.launcher.start": (
            "JOB_NAME",
            "become",
            "check_program",
            "fork_child",
            "make_start_error",
            "start_detached",
        ),
        "anyaccel.launcher.use": ("ProcessLease", "refuse_if_loaded"),
        "anyaccel.launcher.verdicts": ("LeaseWatch", "leases", "watch_leases", "why"),
    },
)
__all__ += ["time_limit"]
