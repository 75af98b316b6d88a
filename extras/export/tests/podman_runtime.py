"""What podman asks an OCI runtime to do: the real podman, with a runtime that writes the request down and refuses."""

import json
import os
import subprocess

# Podman trusts runtimes of this name to do without cgroups, which a container in a container may not have.
NAME = "crun"
SCRIPT = """\
#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in --bundle) cp "$2/config.json" {request} ;; esac
    shift
done
exit 1
"""


def request(folder, *flags, specification=None):
    """The configuration with which podman would start a container, or what podman says when it refuses the flags.

    Podman reads CDI specifications in fixed places only, so it gets a /run of its own, where its state is too.
    """
    folder.mkdir()
    (folder / "root" / "bin").mkdir(parents=True)
    runtime = folder / NAME
    runtime.write_text(SCRIPT.format(request=folder / "request.json"))
    runtime.chmod(0o755)
    (folder / "anyaccel.json").write_text(specification or "")
    podman = ["podman", "--root=/run/store", "--runroot=/run/state", "--tmpdir=/run/tmp"]
    podman += ["--cgroup-manager=cgroupfs", "--storage-driver=vfs", f"--runtime={runtime}"]
    podman += ["run", "--rm", "--network=none", "--cgroups=disabled", *flags, "--rootfs", f"{folder}/root", "/bin/true"]
    steps = 'mount -t tmpfs tmpfs /run && mkdir /run/cdi && if [ -s "$0" ]; then cp "$0" /run/cdi/; fi && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", steps, str(folder / "anyaccel.json"), *podman],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HOME": str(folder)},
    )
    found = folder / "request.json"
    return json.loads(found.read_text()) if found.exists() else done.stderr


def devices(asked):
    return [entry["path"] for entry in asked["linux"].get("devices", ())]


def mounts(asked):
    return {entry["destination"]: (entry["source"], entry["options"]) for entry in asked["mounts"]}


def environment(asked):
    return dict(entry.split("=", 1) for entry in asked["process"]["env"])
