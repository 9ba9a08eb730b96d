"""Names that AReaL's workflow files import from ``areal.utils``; nothing inside areal_lite imports them."""
