"""Fault campaigns: what the commands do where disks fail, files lie, processes die and the power goes.

    python -m tests.faults [--quick] [--num_faults N] [--only NAME] [--form FORM] [--json FILE]

A campaign disturbs one thing in a small data set, runs one command, and asks how that ended: it *refused*
in words, or what it made is *equal* to what it makes undisturbed. Everything else is a failure: *wrong*
(it ended well, with other bytes), *traceback*, *hang*, *memory*.

    small_data_sets the data sets -> commands run on copies of them -> forked_case one run in a process of
    its own -> judging how it ended; os_calls.c fails, kills or stops at the k-th call to the operating system

    disturbed_runs, disturbed_files, power_loss: the campaigns, each a generator of outcomes

Thousands of runs take minutes, as each is a fork of one process that has imported everything already.
"""
