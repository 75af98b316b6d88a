"""What holds devices and starts what was asked for: environments, commands, jobs and sweeps."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.launcher.command": ("become", "run"),
        "anyaccel.launcher.environment": ("WorkerEnvironment", "worker_environment"),
        "anyaccel.launcher.hold": ("Hold", "acquire", "acquire_async", "leases", "why"),
        "anyaccel.launcher.launch": ("KnownNames", "Launch", "open_scheduler", "prepare", "validate"),
        "anyaccel.launcher.rendezvous": ("Rendezvous",),
        "anyaccel.launcher.use": ("Use", "refuse_if_loaded"),
    },
)
