// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Memory images of vrdma-check: patterns that depend on nothing but a seed and a position, and
 * layouts of one message in many pieces. Knows no RDMA.
 */
#ifndef VRDMA_CHECK_IMAGE_H
#define VRDMA_CHECK_IMAGE_H

#include <stddef.h>
#include <stdint.h>

enum { GUARD = 4096, MAX_PIECES = 12, MAX_GAP = 40, NUM_SHAPES = 4 };

/* A message laid out in memory: pieces in message order, anywhere in the region. */
struct layout {
	uint32_t num, span;
	struct {
		uint32_t at, len;
	} piece[MAX_PIECES];
};

/*
 * splitmix64: byte i of the stream `seed` does not depend on where or in which pieces it is
 * written.
 */
static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

static void pattern(uint8_t *out, uint64_t seed, size_t from, size_t len)
{
	uint64_t word = 0;
	size_t i;

	for (i = from; i < from + len; i++) {
		if (i == from || i % 8 == 0)
			word = mix(seed + i / 8);
		out[i - from] = (uint8_t)(word >> (i % 8 * 8));
	}
}

/*
 * Shape 0: one piece. 1: two. 2: five, one of them empty. 3: many, last piece first in memory. Odd
 * gaps between.
 */
static struct layout make_layout(uint32_t len, uint32_t shape, uint64_t seed, uint32_t max_pieces)
{
	static const uint32_t counts[NUM_SHAPES] = { 1, 2, 5, MAX_PIECES };
	uint32_t num = counts[shape], left = len, at = GUARD, i, k;
	struct layout l = {};

	if (num > max_pieces)
		num = max_pieces;
	l.num = num;
	for (i = 0; i < num; i++) {
		uint32_t part = i == num - 1 ? left : left / (num - i);

		if (i < num - 1 && left)
			part = (uint32_t)((part + mix(seed + i) % (part + 1)) % (left + 1));
		if (shape == 2 && i == 1)
			part = i == num - 1 ? left : 0;
		l.piece[i].len = part;
		left -= part;
	}
	for (k = 0; k < num; k++) {
		i = shape == 3 ? num - 1 - k : k;
		at += (uint32_t)(mix(seed + 100 + k) % MAX_GAP);
		l.piece[i].at = at;
		at += l.piece[i].len;
	}
	l.span = at + GUARD;
	return l;
}

static void place_message(uint8_t *memory, const struct layout *l, uint64_t seed)
{
	size_t done = 0;
	uint32_t i;

	for (i = 0; i < l->num; i++) {
		pattern(memory + l->piece[i].at, seed, done, l->piece[i].len);
		done += l->piece[i].len;
	}
}

/* The region without a message; everything that is found here later and was not sent is a fault. */
static void place_background(uint8_t *memory, const struct layout *l, uint64_t seed)
{
	pattern(memory, ~seed, 0, l->span);
}

#endif
