"""Leases of devices, environments of workers, and the start of commands."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.launcher.containers": "container merge_edits",
        "anyaccel.launcher.environment": "DEVICES_VARIABLE WorkerEnvironment worker_environment",
        "anyaccel.launcher.hold": "DeviceLease acquire take_async",
        "anyaccel.launcher.inside": "ProcessSetup",
        "anyaccel.launcher.launch": (
            "AcquireOptions Launch StartOptions check_options check_start plan_launch prepare remove_group"
        ),
        "anyaccel.launcher.monitor": "end_in_time",
        "anyaccel.launcher.open_lease": "OpenLease UsageMeter has_hook list_own_leases plan_handover",
        "anyaccel.launcher.rendezvous": "Rendezvous make_rank_variables",
        "anyaccel.launcher.schedulers": "count_capacity",
        "anyaccel.launcher.scope": "LedgerRequest Scope",
        "anyaccel.launcher.start": "JOB_NAME become fork_child make_start_error require_program start_detached",
        "anyaccel.launcher.time_limit": "EarlySignal TimeLimit",
        "anyaccel.launcher.use": "get_process_lease refuse_if_loaded",
        "anyaccel.launcher.verdicts": "describe_wait estimate_start find_limits leases why",
    },
)
__all__ += ["time_limit"]
