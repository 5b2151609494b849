#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Cuts the sample of tests/data/retrieval16k from the full recording: all keys and values, the last 512 queries, and the
expected results at the query positions that lie among them. Usage: make_sample.py FULL_FOLDER OUTPUT_FOLDER"""
import pathlib
import sys

import numpy as np

QUERIES = 512

source, target = map(pathlib.Path, sys.argv[1:3])
target.mkdir(parents=True, exist_ok=True)


def load(name):
    return np.load(source / f"{name}.npy")


def save(name, array):
    np.save(target / f"{name}.npy", np.ascontiguousarray(array))


q = load("q")
first = q.shape[1] - QUERIES
save("q", q[:, first:])
save("k", load("k"))
save("v", load("v"))

pos = load("pos")
inside = pos >= first
save("pos", pos[inside])
for selector in ("pisa", "pisa1", "pisa2", "flat_mean", "flat_lse"):
    save(f"sel_{selector}", load(f"sel_{selector}")[inside])
    save(f"gap_{selector}", load(f"gap_{selector}")[inside])
save("o_pisa", load("o_pisa")[inside])
save("o_dense", load("o_dense")[inside])
save("lse_pisa", load("lse_pisa")[inside])

answer = load("answer_pos")
inside = answer >= first
save("answer_pos", answer[inside])
save("needle_pos", load("needle_pos")[inside])
