"""``areal-lite init``: new projects from templates/."""
