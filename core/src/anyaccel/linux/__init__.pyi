from anyaccel.linux import mark as mark
from anyaccel.linux import process as process
from anyaccel.linux.descriptors import list_descriptors as list_descriptors
from anyaccel.linux.process import pid_namespace as pid_namespace
from anyaccel.linux.teardown import Teardown as Teardown
from anyaccel.linux.teardown import find_carriers as find_carriers
from anyaccel.linux.teardown import tell_left as tell_left
