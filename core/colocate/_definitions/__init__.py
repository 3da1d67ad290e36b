"""Classes and functions that no other process can import: they travel once, under an id, and are named from then on.

`ids` has what this process knows by id, `pickler` names definitions in bodies and puts them into bundles, `making`
makes what comes by value, `bundles` has what each receiver knows and is sent; `names` decides what an import finds, and
`sources` has the modules that travel as text. `codec` makes bytes of values, and says what can't be.
"""
