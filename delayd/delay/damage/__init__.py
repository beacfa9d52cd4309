"""Damage: files that can't be read now are set aside until they are whole, or given up (rules L5, L10).

A map. `quarantine`, one folder up, has the names of everything that is damaged, and operators' decisions.

    set_aside           rows whose bodies can't be read, values that do not check, files that someone removes or cuts
    mending             looks at files again, has the server begin anew when one is whole, and takes it back then
    keys_rebuild        makes the index of keys again
"""
