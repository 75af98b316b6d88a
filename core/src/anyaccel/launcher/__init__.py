"""What holds devices and starts what was asked for: environments, commands, jobs and sweeps."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.launcher.bind": ("bound",),
        "anyaccel.launcher.capacity": ("count_capacity",),
        "anyaccel.launcher.command": ("become", "not_started", "run"),
        "anyaccel.launcher.detached": ("JOB_NAME", "exit_status_of", "start_detached"),
        "anyaccel.launcher.environment": ("WorkerEnvironment", "worker_environment"),
        "anyaccel.launcher.hold": ("Hold", "acquire", "acquire_async", "leases", "take_async", "why"),
        "anyaccel.launcher.launch": ("KnownNames", "Launch", "open_scheduler", "prepare", "validate"),
        "anyaccel.launcher.monitor": ("end_in_time",),
        "anyaccel.launcher.rendezvous": ("Rendezvous",),
        "anyaccel.launcher.start": ("check_program", "start_marked"),
        "anyaccel.launcher.usage": ("Usage",),
        "anyaccel.launcher.use": ("Use", "refuse_if_loaded"),
    },
)
__all__ += ["time_limit"]
