"""The public names of ``anyaccel_testing``, which the extra ``testing`` brings."""

from anyaccel.extras import moved

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel_testing import *  # noqa: F403 - its __all__ lists what is public
else:
    __getattr__ = moved(__name__, "anyaccel_testing", "testing")
