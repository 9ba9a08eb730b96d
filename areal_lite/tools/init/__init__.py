"""``areal-lite init``: new projects from templates/.

Promises that a template is a working project, tested as it is, and that nothing is overwritten. Read new_project.
"""
