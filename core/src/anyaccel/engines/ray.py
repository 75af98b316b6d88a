"""The public names of ``anyaccel_ray``, which the extra ``ray`` brings."""

from anyaccel.extras import moved

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel_ray import *  # noqa: F403 - its __all__ lists what is public
else:
    __getattr__ = moved(__name__, "anyaccel_ray", "ray")
