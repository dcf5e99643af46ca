// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * process-heap: what malloc(3) owes to a program, with the shared heap of NICs for processes
 * preloaded (vhost-rdma/process/heap): large blocks, more than the heap has, memory given back,
 * threads, fork. It needs no device.
 *
 * A case prints "ok NAME" or "fail NAME: why"; exit status 0 only if all were ok.
 *
 *     LD_PRELOAD=…/libvhost_rdma_heap.so process-heap [CASE]
 *
 * Build: gcc -O2 -Wall -Wextra -o process-heap process-heap.c -lpthread -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
#define PAGE ((size_t)4096)
/* What free memory the heap may keep for the next block, and room for what the rest uses. */
#define SLACK (48 * MIB)

static char why[256];
static int (*vrdma_heap)(void **start, size_t *len);
static char *self;

static bool fail(const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	vsnprintf(why, sizeof(why), fmt, args);
	va_end(args);
	return false;
}

#define TRY(cond)                                                                                  \
	do {                                                                                       \
		if (!(cond))                                                                       \
			return fail("line %d: %s (errno %d)", __LINE__, #cond, errno);             \
	} while (0)

/* The compiler knows malloc, and leaves out what is not used: not with this between. */
static void *volatile kept;

static void *get(size_t size)
{
	kept = malloc(size);
	return kept;
}

static bool in_heap(const void *ptr)
{
	size_t len;
	void *start;

	vrdma_heap(&start, &len);
	return start && (uintptr_t)ptr - (uintptr_t)start < len;
}

/* Bytes that the heap's file holds. */
static size_t resident(void)
{
	struct stat is;
	size_t len;
	void *start;

	if (fstat(vrdma_heap(&start, &len), &is))
		return SIZE_MAX;
	return (size_t)is.st_blocks * 512;
}

static uint64_t seed = 88172645463325252u;

static uint64_t any(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

/* A word at both ends, and every so many bytes between. */
static void mark(uint8_t *ptr, size_t size, size_t step, uint64_t word)
{
	size_t at;

	for (at = 0; at + 8 <= size; at += step)
		memcpy(ptr + at, &word, 8);
	if (size >= 8)
		memcpy(ptr + size - 8, &word, 8);
}

static bool marked(const uint8_t *ptr, size_t size, size_t step, uint64_t word)
{
	size_t at;

	for (at = 0; at + 8 <= size; at += step) {
		/* The last word may lie across the one before it. */
		if (at + 16 <= size && memcmp(ptr + at, &word, 8))
			return false;
	}
	return size < 8 || !memcmp(ptr + size - 8, &word, 8);
}

static bool is_zero(const uint8_t *ptr, size_t size)
{
	return !size || (!*ptr && !memcmp(ptr, ptr + 1, size - 1));
}

/* Blocks of this size until one is not the heap's, which is the last. */
static size_t fill(void **blocks, size_t most, size_t size)
{
	size_t n = 0;

	while (n < most && (blocks[n] = get(size))) {
		if (!in_heap(blocks[n++]))
			break;
	}
	return n;
}

static void free_all(void **blocks, size_t n)
{
	while (n)
		free(blocks[--n]);
}

/* ---- Cases ----------------------------------------------------------------------------------- */

static bool large(void)
{
	void *small = get(100);
	uint8_t *block;
	int turn;

	for (turn = 0; turn < 3; turn++) {
		block = get(3 * GIB);
		TRY(block && in_heap(block));
		mark(block, 3 * GIB, 512 * MIB, 7);
		TRY(marked(block, 3 * GIB, 512 * MIB, 7));
		TRY(malloc_usable_size(block) >= 3 * GIB);
		free(block);
	}
	TRY(resident() < SLACK);
	/* Half of the heap and a little more, beside what is there already. */
	block = get(2 * GIB);
	TRY(block && in_heap(block));
	free(block);
	free(small);
	return true;
}

static bool beyond(void)
{
	uint8_t *blocks[7];
	size_t i, inside = 0;

	for (i = 0; i < 7; i++) {
		blocks[i] = get(GIB);
		TRY(blocks[i]);
		inside += in_heap(blocks[i]);
		mark(blocks[i], GIB, 256 * MIB, i);
		TRY(malloc_usable_size(blocks[i]) >= GIB);
	}
	/* Four less a page or two. */
	TRY(inside == 3);
	for (i = 0; i < 7; i++)
		TRY(marked(blocks[i], GIB, 256 * MIB, i));
	free_all((void **)blocks, 7);
	kept = get(3 * GIB);
	TRY(kept && in_heap(kept));
	free(kept);
	/* More than anybody has. */
	errno = 0;
	TRY(!get(SIZE_MAX / 2) && errno == ENOMEM);
	return true;
}

/* What was freed serves blocks of any size. */
static bool reuse(void)
{
	static void *blocks[70000];
	size_t size, n, i;

	for (size = 3 * GIB / 2; size > 64 * KIB; size = size * 2 / 3) {
		kept = get(size);
		TRY(kept && in_heap(kept));
		free(kept);
	}
	/* The heap in blocks of 64 KiB, every other one first. */
	n = fill(blocks, 70000, 64 * KIB);
	TRY(n > 60000 && n < 70000);
	for (i = 0; i < n; i += 2)
		free(blocks[i]);
	for (i = 1; i < n; i += 2)
		free(blocks[i]);
	kept = get(3 * GIB);
	TRY(kept && in_heap(kept));
	free(kept);
	return true;
}

static bool churn(void)
{
	static void *small[4096];
	uint8_t *blocks[4] = {};
	size_t sizes[4] = {}, live = 0, i, n, turn, size;

	for (turn = 0; turn < 30; turn++) {
		i = any(&seed) % 4;
		live -= sizes[i];
		free(blocks[i]);
		sizes[i] = MIB + any(&seed) % (40 * MIB);
		blocks[i] = get(sizes[i]);
		TRY(blocks[i] && in_heap(blocks[i]));
		memset(blocks[i], 1, sizes[i]);
		live += sizes[i];
		TRY(resident() < live + SLACK);
	}
	free_all((void **)blocks, 4);
	TRY(resident() < SLACK);
	for (size = 20; size < 100 * KIB; size = size * 3 + 8) {
		n = 128 * MIB / size < 4096 ? 128 * MIB / size : 4096;
		for (i = 0; i < n; i++) {
			TRY((small[i] = get(size)));
			memset(small[i], 1, size);
		}
		free_all(small, n);
		TRY(resident() < SLACK);
	}
	return true;
}

static bool both_kinds(void)
{
	static void *blocks[128];
	uint8_t *block = get(8 * MIB), *moved, *other;
	uintptr_t was = (uintptr_t)block;
	void *ptr = NULL;
	size_t n;

	TRY(block && in_heap(block));
	mark(block, 8 * MIB, PAGE, 11);
	/* Where it is, while there is room behind it. */
	moved = realloc(block, 16 * MIB);
	TRY((uintptr_t)moved == was && marked(moved, 8 * MIB, PAGE, 11));
	mark(moved, 16 * MIB, PAGE, 12);
	n = fill(blocks, 128, 64 * MIB);
	TRY(n > 50 && n < 128);
	moved = realloc(moved, 200 * MIB);
	TRY(moved && !in_heap(moved));
	TRY(marked(moved, 16 * MIB, PAGE, 12) && malloc_usable_size(moved) >= 200 * MIB);
	moved = realloc(moved, 220 * MIB);
	TRY(moved && marked(moved, 16 * MIB, PAGE, 12));
	moved = realloc(moved, 1000);
	TRY(moved && marked(moved, 8, PAGE, 12));
	other = aligned_alloc(2 * MIB, 128 * MIB);
	TRY(other && !in_heap(other) && (uintptr_t)other % (2 * MIB) == 0);
	free(other);
	TRY(!posix_memalign(&ptr, 64, 128 * MIB) && ptr && !in_heap(ptr));
	TRY((uintptr_t)ptr % 64 == 0);
	free(ptr);
	other = calloc(128, MIB);
	TRY(other && !in_heap(other) && is_zero(other, MIB));
	free(other);
	free(moved);
	free_all(blocks, n);
	/* Shorter, and the rest is given back. */
	block = get(64 * MIB);
	TRY(block && in_heap(block));
	memset(block, 3, 64 * MIB);
	was = (uintptr_t)block;
	block = realloc(block, 64 * KIB);
	TRY((uintptr_t)block == was && malloc_usable_size(block) == 64 * KIB);
	TRY(resident() < SLACK && block[0] == 3 && block[64 * KIB - 1] == 3);
	block = realloc(block, 100);
	TRY(block && block[99] == 3);
	TRY(!realloc(block, 0));
	return true;
}

static bool zeroes(void)
{
	static const size_t sizes[] = { 1, 40, 1000, 30000, 33000, 100000, 5000000, 40000000 };
	volatile size_t too_many = SIZE_MAX / 2;
	uint8_t *block;
	size_t i;
	int turn;

	for (turn = 0; turn < 3; turn++) {
		for (i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
			block = get(sizes[i]);
			TRY(block);
			memset(block, 0xff, malloc_usable_size(block));
			free(block);
			block = calloc(1, sizes[i]);
			TRY(block && in_heap(block) && is_zero(block, sizes[i]));
			memset(block, 0xff, sizes[i]);
			free(block);
		}
	}
	/* What was never written costs nothing, though a part of it was in use. */
	block = get(10 * MIB);
	TRY(block);
	memset(block, 0xff, 10 * MIB);
	free(block);
	block = calloc(3, GIB);
	TRY(block && in_heap(block) && resident() < SLACK);
	TRY(is_zero(block, 20 * MIB));
	free(block);
	errno = 0;
	kept = calloc(too_many, 3);
	TRY(!kept && errno == ENOMEM);
	return true;
}

static bool aligned(void)
{
	size_t alignment, size, i;
	uint8_t *blocks[4];
	void *ptr;

	for (alignment = 16; alignment <= 64 * MIB; alignment *= 2) {
		for (size = 1; size < 40 * KIB; size = size * 5 + 3) {
			for (i = 0; i < 4; i++) {
				blocks[i] = memalign(alignment, size);
				TRY(blocks[i] && in_heap(blocks[i]));
				TRY((uintptr_t)blocks[i] % alignment == 0);
				TRY(malloc_usable_size(blocks[i]) >= size);
				memset(blocks[i], (int)i, size);
			}
			for (i = 0; i < 4; i++)
				TRY(blocks[i][0] == i && blocks[i][size - 1] == i);
			free_all((void **)blocks, 4);
		}
	}
	for (size = 0; size < 70 * KIB; size += 13) {
		ptr = get(size);
		TRY(ptr && (uintptr_t)ptr % 16 == 0 && malloc_usable_size(ptr) >= size);
		free(ptr);
	}
	TRY(posix_memalign(&ptr, 3, 100) == EINVAL);
	errno = 0;
	kept = memalign(24, 100);
	TRY(!kept && errno == EINVAL);
	kept = valloc(10);
	TRY(kept && (uintptr_t)kept % PAGE == 0);
	free(kept);
	kept = pvalloc(10);
	TRY(kept && malloc_usable_size(kept) >= PAGE);
	free(kept);
	return true;
}

#include "process-heap-children.h"

/* ---- Where the heap is not to be, or cannot -------------------------------------------------- */

/* This program again, for the case `plain`. */
static bool again(const char *variable, int limit, rlim_t most)
{
	struct rlimit both = { most, most };
	pid_t child;

	fflush(NULL);
	child = fork();
	TRY(child >= 0);
	if (!child) {
		if (variable)
			setenv(variable, "0", 1);
		if (!most || !setrlimit((unsigned int)limit, &both))
			execl(self, self, "plain", NULL);
		_exit(3);
	}
	return wait_for(child);
}

/* All there is, without a block of the heap. */
static bool plain(void)
{
	uint8_t *block = get(MIB);

	TRY(block && !in_heap(block));
	memset(block, 1, MIB);
	block = realloc(block, 3 * MIB);
	TRY(block && block[MIB - 1] == 1);
	free(block);
	TRY(calloc(3, 3) && !in_heap(memalign(256, 100)));
	return true;
}

static bool off(void)
{
	return again("VHOST_RDMA_SHARED_HEAP", 0, 0);
}

static bool limits(void)
{
	return again(NULL, RLIMIT_AS, 2 * GIB) && again(NULL, RLIMIT_FSIZE, MIB);
}

static const struct {
	const char *name;
	bool (*run)(void);
} cases[] = {
	{ "large", large },
	{ "beyond", beyond },
	{ "reuse", reuse },
	{ "churn", churn },
	{ "both-kinds", both_kinds },
	{ "zeroes", zeroes },
	{ "aligned", aligned },
	{ "threads", threads },
	{ "forks", forks },
	{ "forks-beside-threads", forks_beside_threads },
	{ "forks-without-a-file", forks_without_a_file },
	{ "off", off },
	{ "limits", limits },
	/* The last: it takes the heap's descriptor away. */
	{ "closed", closed },
};

int main(int argc, char **argv)
{
	const char *only = argc > 1 ? argv[1] : NULL;
	int run = 0, bad = 0;
	size_t i;

	self = argv[0];
	vrdma_heap = (int (*)(void **, size_t *))dlsym(RTLD_DEFAULT, "vrdma_heap");
	if (!vrdma_heap) {
		fprintf(stderr, "the shared heap is not preloaded\n");
		return 2;
	}
	if (only && !strcmp(only, "plain"))
		return !plain();
	for (i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		if (only && strcmp(only, cases[i].name))
			continue;
		run++;
		if (cases[i].run()) {
			printf("ok %s\n", cases[i].name);
		} else {
			bad++;
			printf("fail %s: %s\n", cases[i].name, why);
		}
		fflush(stdout);
	}
	if (!run)
		fprintf(stderr, "no such case\n");
	return bad || !run;
}
