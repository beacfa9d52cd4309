"""Random walks of a realtime server's groups, beside a model of what each group should be (rules Q1, Q3 to Q5).

`model` is the reference: the fate of each message and of each handle, in dictionaries. `walk` takes steps with the real
core in memory and with the model, and compares after each. `planted` has bugs that the walks must find.
"""
