"""Classes and functions that no other process can import: they travel once, under an id, and are named from then on.

`known` has what this process knows by id, `pickler` puts ids into pickles in place of objects, `making` builds what
comes by value, `lots` has what travels and what each receiver has been sent, and `names` decides what an import finds.
"""
