"""Names that AReaL's workflow files import from ``areal.experimental``; nothing inside areal_lite imports them."""
