"""The demo: real processes, a real model and real files on one machine, with a parent that follows a script.

`agents` is the declaration that worker and host share, `parent` what the parent's model would do, `processes` what is
started, `show` runs it all, `report` prints and judges it.
"""
