from anyaccel.inventory.record import EXPECTED as EXPECTED
from anyaccel.inventory.record import write_expected as write_expected
