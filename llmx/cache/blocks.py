"""Which block holds what, in every KV group. Ids only: the tensors live in pools.py."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from llmx.core import Sequence

Copies = list[tuple[int, int, int]]  # (group, from block, to block)


@dataclass(frozen=True)
class GroupShape:
    """A KV group: the window that its layers look back on (None: all of the text) and how many blocks it has."""

    window: int | None
    blocks: int


class Pool:
    """One group's blocks. free + held == count - 1 always; block 0 is nobody's: padding rows and passed blocks."""

    def __init__(self, shape: GroupShape) -> None:
        self.window, self.count = shape.window, shape.blocks
        self.refs = [0] * self.count
        self.free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(1, self.count))  # next to reuse first
        self.by_hash: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}

    @property
    def held(self) -> int:
        return self.count - 1 - len(self.free)

    def take(self) -> int:
        block, _ = self.free.popitem(last=False)
        if digest := self.hash_of.pop(block, None):
            del self.by_hash[digest]
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        if block:
            if not self.refs[block]:
                del self.free[block]
            self.refs[block] += 1

    def drop(self, block: int) -> None:
        """Blocks that hold a published prefix are reused last, in the order they were dropped in."""
        if block:
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None
                if block not in self.hash_of:
                    self.free.move_to_end(block, last=False)

    def publish(self, block: int, digest: bytes) -> None:
        if block and digest not in self.by_hash and block not in self.hash_of:
            self.by_hash[digest], self.hash_of[block] = block, digest

    def first_needed(self, computed: int, size: int) -> int:
        """The first logical block that a query at position `computed` looks into."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // size

    def check(self, tables: Iterable[list[int]]) -> None:
        held = [0] * self.count
        for table in tables:
            for block in filter(None, table):
                held[block] += 1
        assert held == self.refs, "reference counts"
        assert sorted(self.free) == [b for b in range(1, self.count) if not self.refs[b]], "leaked or doubly free"


class BlockManager:
    """Tables of all sequences in all groups. A reservation is granted in every group or in none.

    Prefix cache: block i of a text is found by a hash of its tokens and of all before them, keyed by a secret of this
    process and rooted in the request's salt, so that nobody can craft a collision or probe another tenant's prompts.
    """

    def __init__(
        self, size: int, groups: Iterable[GroupShape], *, prefix_caching: bool = True, key: bytes | None = None
    ) -> None:
        self.size, self.prefix_caching = size, prefix_caching
        self.pools = [Pool(shape) for shape in groups]
        self.key = os.urandom(32) if key is None else key

    def shortage(self, tokens: int) -> tuple[int, int] | None:
        """(blocks that a text of so many tokens needs, blocks there are) of a group that is too small for it alone."""
        for pool in self.pools:
            needed = self.blocks_for(tokens)
            if pool.window is not None:  # the rest of its window may begin in mid-block, and one token is computed
                needed = min(needed, self.blocks_for(pool.window - 1) + 1)
            if needed > pool.count - 1:
                return needed, pool.count - 1
        return None

    def reach(self, sequence: Sequence) -> int:
        """The slot that its tables could reach up to if it were alone: a window group may be smaller than its text."""
        passed = (pool.first_needed(sequence.computed, self.size) for pool in self.pools)
        return min((pool.count - 1 + n) * self.size for pool, n in zip(self.pools, passed, strict=True))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def least_free(self) -> int:
        return min(len(pool.free) for pool in self.pools)

    def fits(self, sequence: Sequence, end: int) -> bool:
        """Whether slots [computed, end) exist and are this sequence's alone."""
        first, last = sequence.computed // self.size, -(-end // self.size)
        if not sequence.tables:
            return False
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            if len(table) < last:
                return False
            for block in table[first:last]:
                if pool.refs[block] > 1 or block in pool.hash_of:
                    return False
        return True

    def reserve(self, sequence: Sequence, end: int) -> Copies | None:
        """Make slots [computed, end) exist and be this sequence's alone. None, and nothing changed: they don't fit."""
        if self.fits(sequence, end):
            return []
        if not sequence.tables:
            sequence.tables = [[] for _ in self.pools]
        first, last = sequence.computed // self.size, self.blocks_for(end)
        shared = []
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            mine = [i for i in range(first, min(len(table), last)) if pool.refs[table[i]] > 1]
            if len(mine) + max(0, last - len(table)) > len(pool.free):
                return None
            shared.append(mine)
        copies = []
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            for i in shared[group]:  # copy on write
                source, table[i] = table[i], pool.take()
                pool.refs[source] -= 1
                copies.append((group, source, table[i]))
            while len(table) < last:
                table.append(pool.take())
            assert not any(b in pool.hash_of for b in table[first:last]), "write into a published block"
        return copies

    def shrink(self, sequence: Sequence, end: int) -> None:
        """Give back whole blocks past `end`: draft slots that somebody else may want."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            while len(table) > self.blocks_for(end):
                pool.drop(table.pop())

    def adopt(self, sequence: Sequence) -> None:
        """Start from the longest published prefix that every group still has what it needs of.

        The last token is always computed, for its logits; a request for prompt logprobs takes no hit.
        """
        assert not any(sequence.tables), "adopts once, at admission"
        limit = (len(sequence.tokens) - 1) // self.size
        if not self.prefix_caching or sequence.request.params.prompt_logprobs is not None:
            limit = 0
        hits = self._longest_hit(sequence, limit)
        sequence.tables = []
        for pool in self.pools:
            first = pool.first_needed(hits * self.size, self.size)
            table = [0] * first + [pool.by_hash[sequence.digests[i]] for i in range(first, hits)]
            for block in table:
                pool.share(block)
            sequence.tables.append(table)
        sequence.published, sequence.computed = hits, hits * self.size

    def _longest_hit(self, sequence: Sequence, limit: int) -> int:
        """Blocks: all of them in full groups, and in window groups those that the next query looks into."""
        run = [0] * len(self.pools)  # per group: hits in a row that end at the block looked at
        best = 0
        for i in range(limit):
            digest = self._digest(sequence, i)
            run = [r + 1 if digest in p.by_hash else 0 for r, p in zip(run, self.pools, strict=True)]
            if any(not r and p.window is None for r, p in zip(run, self.pools, strict=True)):
                break
            done = i + 1
            needed = [done - p.first_needed(done * self.size, self.size) for p in self.pools]
            if all(r >= n for r, n in zip(run, needed, strict=True)):
                best = done
        return best

    def publish(self, sequence: Sequence) -> None:
        """Only verified tokens whose KV is written in every layer are below `computed`, so only they are hashed."""
        if not self.prefix_caching:
            return
        while (sequence.published + 1) * self.size <= sequence.computed:
            digest = self._digest(sequence, sequence.published)
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                pool.publish(table[sequence.published], digest)
            sequence.published += 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        child.computed, child.published, child.digests = parent.computed, parent.published, list(parent.digests)
        child.tables = [table[: self.blocks_for(parent.computed)] for table in parent.tables]
        for pool, table in zip(self.pools, child.tables, strict=True):
            for block in table:
                pool.share(block)

    def pass_window(self, sequence: Sequence) -> None:
        """Free blocks that no query from `computed` on looks into. `computed` never goes back while tables live."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            if pool.window is None:
                continue
            for i in reversed(range(min(pool.first_needed(sequence.computed, self.size), len(table)))):
                if not table[i]:
                    break
                pool.drop(table[i])
                table[i] = 0

    def release(self, sequence: Sequence) -> None:
        for pool, table in zip(self.pools, sequence.tables, strict=bool(sequence.tables)):
            for block in reversed(table):  # tails are evicted before the prefixes that they hang on
                pool.drop(block)
        sequence.tables, sequence.computed, sequence.published = [], 0, 0

    def waste(self, sequence: Sequence) -> int:
        """Slots of the first group that this sequence holds and no token of it needs yet.

        Its newest token has a slot before it has KV; the rest of a prompt on its way in chunks has none.
        """
        live = min(len(sequence.tokens), sequence.computed + 1)
        return len(sequence.tables[0]) * self.size - live if sequence.tables else 0

    def check(self, sequences: Iterable[Sequence] = ()) -> None:
        """Assert that the books balance: for tests, and for the engine when it goes idle."""
        live = [s for s in sequences if s.tables]
        for group, pool in enumerate(self.pools):
            pool.check(s.tables[group] for s in live)

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        digests, tokens, size = sequence.digests, sequence.tokens, self.size
        while len(digests) <= index:
            parent = digests[-1] if digests else self._hash(b"salt" + sequence.request.salt)
            start = len(digests) * size
            digests.append(self._hash(parent + array("I", tokens[start : start + size]).tobytes()))
        return digests[index]

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.key, digest_size=16).digest()
