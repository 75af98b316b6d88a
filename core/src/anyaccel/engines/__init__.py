"""The same pool on other schedulers: they place, our plug-ins say what a worker must see."""
