"""The command line: it parses arguments and prints results, on top of the public interface."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.cli.arguments": "Parser",
        "anyaccel.cli.cancel": "cancel_by_id",
        "anyaccel.cli.entry": "main program",
        "anyaccel.cli.hold": "go_on_alone",
        "anyaccel.cli.options": (
            "BareSeconds acquire add_command add_grace add_launch add_note add_request add_signal add_start add_time "
            "add_wait duration machine_options name_devices start_options survey time_limit wait_options whole"
        ),
        "anyaccel.cli.parser": "parse report_errors",
        "anyaccel.cli.run": "acquire_devices",
        "anyaccel.cli.status": "INTERVAL add_looks",
        "anyaccel.cli.table": (
            "Column choose_columns lay_out megahertz memory_use plain_rows print_table since table_lines"
        ),
    },
)
__all__ += ["output", "sample"]
