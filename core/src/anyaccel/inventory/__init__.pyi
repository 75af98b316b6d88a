from anyaccel.inventory.answers import VendorNames as VendorNames
from anyaccel.inventory.answers import interpret as interpret
from anyaccel.inventory.contested import contest as contest
from anyaccel.inventory.current import ALLOCATION_VARIABLE as ALLOCATION_VARIABLE
from anyaccel.inventory.declared import find_named as find_named
from anyaccel.inventory.record import EXPECTED as EXPECTED
from anyaccel.inventory.record import expect as expect
from anyaccel.inventory.record import write_json as write_json
