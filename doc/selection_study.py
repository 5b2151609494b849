#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Selectors against dot products: the table of selection.md.

Usage: selection_study.py FOLDER      (q, k, pos, block_mass, answer_pos, needle_pos as .npy; needs numpy)

q [1][N][heads][dim], k [1][N][1][dim]; block_mass [positions][leaves] is the attention mass of each leaf of 64 keys for
the query at pos, the mean over heads. Queries before 1024 are left out, of the others every STEP-th is taken, and all
answers. A dot product is one pass of one head's query over one vector of dim numbers.
"""
import sys

import numpy as np

LEAF, TOPK, STEP = 64, 8, 5


def logsumexp(x):
    most = x.max(-1, keepdims=True)
    return (most + np.log(np.exp(x - most).sum(-1, keepdims=True)))[..., 0]


class Keys:
    """Statistics of the keys: per level of the pyramid, per piece of a leaf, and the keys far from their node's mean."""

    def __init__(self, k):
        self.k, self.levels, self.outlying = k, {}, {}
        span, level = LEAF, 1
        while True:
            self.levels[level] = self.statistics(k, span)
            if span >= len(k):
                break
            span, level = span * 2, level + 1
        self.pieces = {size: self.statistics(k, size) for size in (8, 16, 32)}

    @staticmethod
    def statistics(k, span):
        rows = k.reshape(-1, span, k.shape[1])
        return {"mean": rows.mean(1), "least": rows.min(1), "most": rows.max(1), "variance": rows.var(1), "span": span}

    def outliers(self, count):
        """Per level, indices of the `count` keys of each node that are farthest from its mean."""
        if count not in self.outlying:
            found = {}
            candidates = np.arange(len(self.k)).reshape(-1, LEAF)
            for level, s in self.levels.items():
                far = ((self.k[candidates] - s["mean"][:, None]) ** 2).sum(2)
                best = np.argsort(-far, axis=1)[:, :count]
                found[level] = np.take_along_axis(candidates, best, 1)
                if level < len(self.levels):
                    candidates = found[level].reshape(-1, 2 * count)
            self.outlying[count] = found
        return self.outlying[count]


class Query:
    """One position: scores of all nodes of a level, per head, with their cost in dot products a node."""

    def __init__(self, keys, q, t, scale):
        self.keys, self.q, self.t, self.scale = keys, q, t, scale
        self.leaves = t // LEAF + 1
        z = np.full((len(q), self.leaves * LEAF), -np.inf, np.float32)
        z[:, : t + 1] = q @ keys.k[: t + 1].T * scale
        self.logits = z.reshape(len(q), self.leaves, LEAF)

    def mean(self, s):
        return self.q @ s["mean"].T * self.scale

    def bound(self, s):
        return (np.maximum(self.q, 0) @ s["most"].T + np.minimum(self.q, 0) @ s["least"].T) * self.scale

    def pairs(self, x):
        return logsumexp(x.reshape(len(self.q), -1, 2))

    def score(self, level, kind):
        s = self.keys.levels[level]
        if kind == "exact":
            return logsumexp(self.logits), LEAF
        if kind == "lse":
            return self.pairs(self.mean(self.keys.levels[level - 1])), 2
        if kind == "bound":
            return self.bound(s), 1
        if kind == "blend":
            if level == 1:
                return (self.mean(s) + self.bound(s)) / 2, 2
            return (self.score(level, "lse")[0] + self.bound(s)) / 2, 3
        if kind == "ahead":
            below = self.keys.levels[level - 1]
            return self.pairs((self.mean(below) + self.bound(below)) / 2), 4
        if kind == "variance":
            return self.mean(s) + self.q**2 @ s["variance"].T * self.scale**2 / 2, 2
        if kind.startswith("outliers"):
            count = int(kind[8:])
            index = self.keys.outliers(count)[level]
            z = (self.q @ self.keys.k[index.ravel()].T * self.scale).reshape(len(self.q), -1, count)
            rest = self.mean(s) + np.log(s["span"] - count)
            return logsumexp(np.concatenate([z, rest[:, :, None]], 2)), 1 + count
        if kind.startswith("pieces"):
            size = int(kind[6:])
            p = self.keys.pieces[size]
            half = (self.mean(p) + self.bound(p)) / 2
            return logsumexp(half.reshape(len(self.q), -1, LEAF // size)), 2 * LEAF // size
        if kind.startswith("means"):
            size = int(kind[5:])
            return logsumexp(self.mean(self.keys.pieces[size]).reshape(len(self.q), -1, LEAF // size)), LEAF // size
        raise ValueError(kind)

    def select(self, inner, beam, vote, prefilter=None, keep=0):
        current = self.t // LEAF
        forced = {0, max(current - 1, 0), current}
        cost = 0

        def nodes(level):
            return -(-self.leaves // 2 ** (level - 1))

        def best(candidates, level, kind, room):
            nonlocal cost
            kept = {f >> (level - 1) for f in forced}
            own = [c for c in candidates if c in kept]
            rest = [c for c in candidates if c not in kept and (c + 1) * (LEAF << (level - 1)) <= self.t + 1]
            if len(own) + len(rest) <= room:
                return sorted(own + rest)
            scores, dots = self.score(level, kind)
            cost += dots * len(rest)
            x = scores[:, rest]
            if vote:
                e = np.exp(x - x.max(1, keepdims=True))
                x = e / e.sum(1, keepdims=True)
            order = np.argsort(-x.sum(0), kind="stable")[: room - len(own)]
            return sorted(own + [rest[i] for i in order])

        level = 1
        while nodes(level) > (beam if level > 1 else TOPK):
            level += 1
        candidates = list(range(nodes(level)))
        for level in range(level, 1, -1):
            candidates = best(candidates, level, inner, beam)
            candidates = [c for p in candidates for c in (2 * p, 2 * p + 1) if c < nodes(level - 1)]
        if prefilter:
            candidates = best(candidates, 1, prefilter, keep)
        return best(candidates, 1, "exact", TOPK), cost


ROWS = [  # name, inner score, beam, vote, prefilter, leaves that it keeps
    ("PISA", "lse", TOPK, False, None, 0),
    ("blend + vote, beam 16", "blend", 16, True, None, 0),
    ("blend + vote, beam 32", "blend", 32, True, None, 0),
    ("blend + vote, beam 64", "blend", 64, True, None, 0),
    ("second order (true variances), beam 32", "variance", 32, True, None, 0),
    ("1 outlier key a node, beam 32", "outliers1", 32, True, None, 0),
    ("2 outlier keys a node, beam 32", "outliers2", 32, True, None, 0),
    ("4 outlier keys a node, beam 32", "outliers4", 32, True, None, 0),
    ("blend, beam 64, prefilter blend 24", "blend", 64, True, "blend", 24),
    ("blend, beam 64, prefilter 8 sub-block means 24", "blend", 64, True, "means8", 24),
    ("blend, beam 64, prefilter halves 24", "blend", 64, True, "pieces32", 24),
    ("blend, beam 64, prefilter quarters 24", "blend", 64, True, "pieces16", 24),
    ("blend, beam 64, prefilter eighths 24", "blend", 64, True, "pieces8", 24),
    ("blend, beam 64, prefilter 4 outlier keys 24", "blend", 64, True, "outliers4", 24),
    ("ahead, beam 16, prefilter quarters 24", "ahead", 16, True, "pieces16", 24),
    ("ahead, beam 32, prefilter quarters 24", "ahead", 32, True, "pieces16", 24),
    ("ahead, beam 32, prefilter quarters 32 (default)", "ahead", 32, True, "pieces16", 32),
    ("flat exact, sum", "lse", 1 << 30, False, None, 0),
    ("flat exact, vote", "lse", 1 << 30, True, None, 0),
]


def main():
    folder = sys.argv[1] + "/"
    q = np.load(folder + "q.npy")[0].astype(np.float32)
    k = np.load(folder + "k.npy")[0, :, 0].astype(np.float32)
    pos, mass = np.load(folder + "pos.npy"), np.load(folder + "block_mass.npy")
    answers = dict(zip(np.load(folder + "answer_pos.npy").tolist(), np.load(folder + "needle_pos.npy").tolist()))
    keys, scale = Keys(k), k.shape[1] ** -0.5
    chosen = [i for i, t in enumerate(pos) if t >= 1024 and (i % STEP == 0 or t in answers)]
    queries = [(i, Query(keys, q[pos[i]], int(pos[i]), scale)) for i in chosen]
    print("| selector | dots a query | recall@8 | mass / best mass | answers found |\n|---|---|---|---|---|")
    for name, *how in ROWS:
        recall, share, cost, found = [], [], [], 0
        for i, query in queries:
            leaves, dots = query.select(*how)
            top = np.argsort(-mass[i], kind="stable")[:TOPK]
            recall.append(len(set(leaves) & set(top)) / TOPK)
            share.append(mass[i][leaves].sum() / mass[i][top].sum())
            cost.append(dots)
            if query.t in answers:
                found += answers[query.t] // LEAF in leaves
        print(f"| {name} | {np.mean(cost):.0f} | {np.mean(recall):.3f} | {np.mean(share):.3f} | {found} of {len(answers)} |",
              flush=True)


if __name__ == "__main__":
    main()
