"""Batch inference: a file of requests in, a file of answers out, in one job that can be killed anywhere and run again.

`job.run` is the way in; `ray-moe batch IN OUT` is the same from a shell. In order: `reading` streams the input through
Ray Data, `rows` makes a request of each row, `driver` keeps the engine full, `answers` generates, `checkpoint` keeps
what is done, `writing` puts the output together.
"""
