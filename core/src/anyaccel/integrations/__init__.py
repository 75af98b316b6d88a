"""Other people's frameworks on the devices of a pool; each is imported only once somebody asks for it."""
