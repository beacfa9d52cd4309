"""Damage: files that can't be read now are set aside until they are whole, or given up (rules L5, L10).

A map. `quarantine`, one folder up, has the names of everything that is damaged.

    file_watch          notices files that someone removes or cuts
    decisions           what operators say of it, and who acts on that
    lost_values         values of the state that do not check
    held                keeps due rows whose bodies can't be read
    mending             looks at files again, and has the server begin anew when one is whole
    keys_rebuild        makes the index of keys again
"""
