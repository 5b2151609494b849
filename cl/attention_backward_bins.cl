/* SPDX-License-Identifier: MIT */
/* Which entries of the inverted lists (inverse.cl) a unit of attention_backward_kv.cl works on.
 *
 * A bin holds the rows of one block (inverse.cl). With SEGMENT entries or more it is cut into pieces of SEGMENT
 * to 2 SEGMENT - 1; each writes a partial sum, and attention_backward_merge adds them in order. Where a cut
 * bin's pieces are is computed, never stored: piece j of a bin whose entries begin at entry F has the slot
 * F / SEGMENT + j, and entry slot * SEGMENT + SEGMENT - 1 is one of the bin. Units are therefore: bins (those
 * that are not cut), then slots. Without lists a bin has q_len_max virtual entries, of which the rows that see the block are
 * used. */

struct bins {
    __global const uint *starts; /* [bins * LIST_GROUP * chunks + 1] */
    ulong count, chunks, rows;   /* rows: entries of a bin without lists */
    ulong segment;
    uint has_lists;
};

inline ulong bin_first(const struct bins *bins, ulong bin)
{
    return bins->has_lists ? (ulong)bins->starts[bin * LIST_GROUP * bins->chunks] : bin * bins->rows;
}

/* Pieces of a bin of so many entries. */
inline ulong bin_pieces(const struct bins *bins, ulong entries)
{
    return entries < 2 * bins->segment ? 1 : entries / bins->segment;
}

/* What a unit works on; pieces 0: nothing. */
struct piece {
    ulong bin, first; /* first entry of the bin */
    ulong entries;    /* of the bin */
    ulong slot, number, pieces;
};

inline struct piece piece_of(const struct bins *bins, ulong unit)
{
    struct piece piece = {unit, 0, 0, 0, 0, 0};
    if (unit < bins->count) {
        piece.first = bin_first(bins, unit);
        piece.entries = bin_first(bins, unit + 1) - piece.first;
        piece.pieces = bin_pieces(bins, piece.entries) == 1;
        return piece;
    }
    piece.slot = unit - bins->count;
    const ulong entry = piece.slot * bins->segment + bins->segment - 1;
    ulong low = 0, high = bins->count;
    while (high - low > 1) {
        ulong middle = (low + high) / 2;
        if (bin_first(bins, middle) <= entry)
            low = middle;
        else
            high = middle;
    }
    piece.bin = low;
    piece.first = bin_first(bins, low);
    piece.entries = bin_first(bins, low + 1) - piece.first;
    const ulong pieces = bin_pieces(bins, piece.entries), slot = piece.first / bins->segment;
    if (pieces > 1 && entry < piece.first + piece.entries && piece.slot >= slot && piece.slot - slot < pieces) {
        piece.number = piece.slot - slot;
        piece.pieces = pieces;
    }
    return piece;
}

/* Where a bin's block is. */
struct place {
    __global const long *sequence;
    uint kv_head, block;
};

inline struct place place_of(__global const long *table, uint sequences, ulong bin, uint shared_head)
{
    struct place place;
    place.sequence = sequence_by(table, sequences, FIELD_BIN, bin);
    const uint blocks = (uint)place.sequence[FIELD_BLOCKS];
    const uint local_bin = (uint)(bin - (ulong)place.sequence[FIELD_BIN]);
    place.kv_head = blocks > 0 ? local_bin / blocks : 0;
    place.block = local_bin - place.kv_head * blocks;
    if (LIST_KV > 1) place.kv_head = shared_head;
    return place;
}

#if STARTS
/* With the caller's block boundaries: bin_table [bins] of first tile, first key and the key after the last one.
 */
#define BIN_TILE(TABLE, BIN) (TABLE)[3 * (BIN)]
#define BIN_KEY(TABLE, BIN) (uint)(TABLE)[3 * (BIN) + 1]
#define BIN_END(TABLE, BIN) (uint)(TABLE)[3 * (BIN) + 2]

/* The bin of a tile: the last one whose first tile is at most this one. */
inline ulong bin_of_tile(__global const long *bin_table, ulong bins, ulong tile)
{
    ulong low = 0, high = bins;
    while (high - low > 1) {
        ulong middle = (low + high) / 2;
        if ((ulong)BIN_TILE(bin_table, middle) <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}
#endif
