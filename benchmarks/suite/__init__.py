"""The suite: every way of saving memory that can be had, on the same steps, in one process.

    PYTHONPATH=src python -m benchmarks.suite --quick

Problem: a figure for one tool alone says nothing. Invariant: all ways share one set of parameters
and one stream of data; peaks are counted allocation by allocation, times are taken in turns, bits
are compared with the plain step's, and a way that fails is a row that says so.

    cases      the networks and their sizes: tiny, for the CPU, for one large GPU
    methods    what makes a network ready: by hand, by its library, by torch, by lowtide
    contest    one network, all methods: peaks, bits, seconds
    largest    the largest batch in a given memory, and samples a second at it
    summary    lowtide against each peer at that peer's peak; tables
    pictures   seconds against memory, one picture a network

Rejected: a process for each way, whose times would differ by what else the machine was doing.
"""
