"""Send classes and functions that other processes can't import. Each is sent once, and later messages refer to an id.

`ids` maps ids to the definitions of this process. `pickler` refers to definitions in bodies, and packs them into
bundles. `making` rebuilds definitions that come by value. `bundles` records the definitions that each receiver has, and
packs missing ones. `names` decides which objects an import finds. `sources` ships modules as text. `codec` converts
values to bytes, and explains failures.
"""
