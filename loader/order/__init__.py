"""The order of samples, complete: whoever has this page can write it anew. Nothing here reads a file.

Words, and the unit in which each is counted:

===========  ======================================================================  ====================
word         what it is                                                              counted in
===========  ======================================================================  ====================
tick         L samples, one for each place; what the order counts                    ticks of the run
step         one or more ticks: a global batch, what training counts                 steps of all epochs
place        of a sample in its tick, 0 to L - 1                                     samples
slot         g neighbouring places; ranks share the slots                            slots of a tick
block        K neighbouring samples, the unit of reading                             samples
window       what a slot shuffles at a time                                          samples of a slot
round        64 ticks in which all slots take equally many samples of each source    ticks of the run
pattern      the sources of a slot at the ticks of a round                           ticks of a round
stage        weights and a global batch size, from a step on                         steps
amendment    other stages, given to a run that has begun                             steps
border       the step at which an amendment begins                                   steps
===========  ======================================================================  ====================

Letters, and the names that they have in the code:

======  ======================================================  ==============================
letter  what it is                                              name
======  ======================================================  ==============================
L       samples of a tick                                       ``Order.tick_samples``
g       samples of a slot at a tick: ``group_by_length``, or 1  ``Order.group``
V       slots: L / g                                            ``Order.num_slots``
N       samples of a source                                     ``Order.num_samples``
B       bytes of a source's tars                                ``Source.num_bytes``
K       samples of a block                                      ``Order.block_samples``
M       blocks of a window; it has M K samples of a slot        ``Order.window_samples``
R       ticks of an epoch of a source                           ``Order.ticks_per_epoch``
E       ticks of an epoch of the run                            ``Run.ticks_per_epoch``
S, T    tokens of a row that is packed at load, of all rows     ``row_tokens``, ``num_offsets``
W       ranks                                                   ``world_size``
======  ======================================================  ==============================

0. Numbering (read/shards.py, read/finding.py). The samples of a source have numbers from 0, shard by shard.
   Folders, index.json and tars of other tools come in the order in which they were named, with the shards of
   a folder in the order of their numbers (tars of others: of their names). Then come the shards of data sets
   that were named one by one: folder by folder, as first named, and those of a folder as they were named.
   Samples of a shard have the order of its idx: first those for training, then those for validation, both as
   in the tar. With a split, the others have no number. Rows that are packed at load are numbered as in 3.;
   there are N = T // S of them (for validation rounded up).

1. Hashes (hashes.py). ``mix(v)``, all mod 2^64: v += 0x9E3779B97F4A7C15; v = (v ^ v >> 30) *
   0xBF58476D1CE4E5B9; v = (v ^ v >> 27) * 0x94D049BB133111EB; v ^ v >> 31. ``hash(a, b, ...)`` begins with
   h = 0 and sets h = mix((h + 0x9E3779B97F4A7C15) ^ a), then with b, and so on. Its purposes have numbers:
   ROTATE 1, BLOCKS 2, WINDOWS 3, SLICES 4, OFFSET 5, PATTERN 6, SEED 7. To *sort by a key* the numbers below
   n is to sort them by mix(key ^ number), stably. ``permute(x, n, key)``: x is a number of 2 b bits, b being
   half the bits of n - 1, rounded up. Six turns i = 0 ... 5 set (left, right) = (right, left ^ (mix(hash(key,
   i) ^ right) mod 2^b)); repeat all six until the result is below n. For n < 2 it is x itself.

2. Sizes (order.py, choose_windows). L is the greatest common divisor of the global batch sizes that the run
   began with. B is, with a split, in proportion to its samples, rounded down. M = 1024 // V, at least 4 and
   at most 16. A block has 2^27 // (V M) bytes, at least 2^17 and at most 2^19, but at least min(512 V, 2^20).
   K is these bytes times N // B, at most N // (16 V), at least 1. With g > 1 a window has not M K samples of
   a slot, but min(8192, 2^26 N // B), at least 4 g, rounded down to a multiple of g. The state keeps N, K and
   the window, and a resumed run uses them.

3. A source (order.py). Its epoch has R = N // L ticks; N mod L samples are left out. The sequence of epoch e:
   position p lies in block p // K; if that is one of the N // K whole blocks, it is permuted with the key
   hash(seed, e, BLOCKS); the sample is (block K + p mod K + hash(seed, e, ROTATE)) mod N. Slot s owns the
   positions from s R g on. Its window that begins at tick t has n ticks (the last one fewer) and the
   positions (s R + t) g + i for i below n g, where the i are sorted by the key hash(seed, e, WINDOWS, s, t).
   With g = 1, tick t + j takes the j-th. With g > 1, sort them by their lengths, stably, and cut them into n
   slices. Sort 0 ... n - 1 by the key hash(seed, e, SLICES, t); tick t + j takes the slice with the j-th
   number in this order. Not shuffled, tick t is samples t L to t L + L - 1. Rows that are packed at load are
   cut from one stream of T tokens, all documents in the order of 0., with their EOS: row x begins at token
   (x S + hash(seed, e, OFFSET)) mod T, not shuffled at x S.

4. Steps (mixture.py). The seed of source number i of a mixture, counting all that the run has had, is
   hash(seed, SEED, i); without a mixture it is the seed. An epoch of the run has E ticks: the sum of the R of
   the sources that it began with. A step takes (global batch size / L) ticks. If it does not fit into the
   epoch, the rest of the epoch is not used, and the step begins the next one. Ticks are counted through all
   epochs, unused ones too.

5. Shares (planned.py, mixture.py). Weights are exact: 0.1 is 1/10. In tokens, each is divided by the mean
   tokens of its source's samples (of the manifests; with a split or a max_length, and for tars of others, of
   2^20 samples, evenly spaced). Over their sum, and as floats, they are the shares of samples; one below
   1/65536 that is not 0 is refused. Their cumulative sums, times 65,536, are rounded half to even, and the
   differences are the ticks of each source in 65,536 ticks. The n-th of a source's c ticks stands at
   (2 n + 1) / c; the ticks are sorted by that, then by the number of the source, and repeat.

6. Rounds (mixture.py). They are counted from the tick at which shares begin, and the last one before other
   shares ends where those begin. In a round that begins at tick t and has n ticks, slot s sorts 0 ... n - 1
   by the key hash(seed, PATTERN, t, s). The j-th tick of the slot takes the source that 5. gives to the tick
   with the j-th number in this order. A slot that is at its k-th tick of a source in this round takes the
   source's tick (ticks of the source before the round) + k, which is tick mod R of epoch // R of that source.

7. Ranks and workers. Of V slots, rank r of W has those from V r // W to V (r + 1) // W - 1. Its batches of a
   tick are its samples in the order of places, batch_size at a time, tick after tick of the step.

8. Amendments (amendment.py). Before step x, with rounds as they are: if the round at the tick of x has begun,
   the border is the first step from x on that begins where this round ends or later, else x. From the border
   on, the given stages hold. If they move the beginning of step x or of the border before that tick, or the
   end of the begun round, the border is one step later, and so on. New shares begin a new round there.

9. Validation. Not shuffled. An epoch has N / L ticks, rounded up, and the last tick repeats samples: with n
   new ones, place p takes sample p n // L of them, and is a repeat, without labels, if p n mod L >= n.

tests/oracle/law.py is this page in plain Python, and is compared with the loader.
"""
