// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Runs of pages of the shared heap (heap.h).
 *
 * Free runs are in lists by their length, a quarter of a power of two each; neighbours are one run.
 * What lies behind all runs (top) was never used. Large runs give their memory back at once, small
 * ones when there are many of them.
 *
 * What is known of pages is in memory of the process alone: a child of fork() has its parent's.
 */
#define _GNU_SOURCE
#include "heap.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define BINS 84
/* Runs of a list that may be too short which are looked at, unless nothing else is left. */
#define LOOK 64

uint8_t *heap_base;
struct tag *heap_tags;

static enum { UNDECIDED, THERE, NONE } state;
static int file = -1;
static struct stat file_is;
/* Of a child that no file could be had for. */
static bool is_private;
/* What a child is to have: a file, or memory. */
static int copy = -1;
static uint8_t *spare;
static uint32_t top = 1;
static uint32_t bins[BINS];
static uint32_t held;

/* ---- The file -------------------------------------------------------------------------------- */

static int new_file(void)
{
	struct rlimit limit;
	int made;

	/* Past the limit of a file's size comes a signal, and not an error alone (setrlimit(2)). */
	if (getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur < HEAP)
		return -1;
	made = (int)KERNEL(memfd_create, "vhost-rdma-heap", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (made >= 0 && (KERNEL(ftruncate, made, HEAP) ||
			  KERNEL(fcntl, made, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))) {
		KERNEL(close, made);
		made = -1;
	}
	return made;
}

static void is_now(int made)
{
	file = made;
	if (KERNEL(fstat, made, &file_is))
		file = -1;
}

/* A program may close descriptors that it does not know, and have another file by the number. */
int heap_file(void)
{
	struct stat is;

	if (file < 0 || KERNEL(fstat, file, &is) || is.st_dev != file_is.st_dev ||
	    is.st_ino != file_is.st_ino)
		return -1;
	return file;
}

bool heap_begin(void)
{
	const char *wanted;
	uint8_t *base;
	int made;

	if (state != UNDECIDED)
		return state == THERE;
	/* The loader allocates before the C library has an environment. */
	if (!environ)
		return false;
	state = NONE;
	wanted = getenv("VHOST_RDMA_SHARED_HEAP");
	if (wanted && !strcmp(wanted, "0"))
		return false;
	made = new_file();
	if (made < 0)
		return false;
	heap_tags = mmap(NULL, PAGES * sizeof(*heap_tags), PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (heap_tags == MAP_FAILED)
		goto err_file;
	base = mmap(NULL, HEAP, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, made, 0);
	if (base == MAP_FAILED)
		goto err_tags;
	is_now(made);
	__atomic_store_n(&heap_base, base, __ATOMIC_RELEASE);
	state = THERE;
	return true;

err_tags:
	munmap(heap_tags, PAGES * sizeof(*heap_tags));
err_file:
	KERNEL(close, made);
	return false;
}

/* By the mapping: the descriptor may be another's by now. */
bool pages_empty(uint32_t page, uint32_t len)
{
	return !madvise(address_of(page), (size_t)len << PAGE_SHIFT,
			is_private ? MADV_DONTNEED : MADV_REMOVE);
}

/* ---- Lists ----------------------------------------------------------------------------------- */

void list_add(uint32_t *list, uint32_t page)
{
	heap_tags[page].next = *list;
	heap_tags[page].prev = 0;
	if (*list)
		heap_tags[*list].prev = page;
	*list = page;
}

void list_remove(uint32_t *list, uint32_t page)
{
	const struct tag *tag = &heap_tags[page];

	if (tag->next)
		heap_tags[tag->next].prev = tag->prev;
	if (tag->prev)
		heap_tags[tag->prev].next = tag->next;
	else
		*list = tag->next;
}

/* Four to a power of two, the shortest first. */
static unsigned int bin_of(uint32_t len)
{
	unsigned int log = 31 - (unsigned int)__builtin_clz(len);

	return 4 * log + (log >= 2 ? len >> (log - 2) : len << (2 - log)) % 4;
}

static void free_add(uint32_t page, uint32_t len, uint32_t may_hold)
{
	struct tag *first = &heap_tags[page], *last = &heap_tags[page + len - 1];

	first->kind = last->kind = FREE;
	first->len = last->len = len;
	first->held = may_hold < len ? may_hold : len;
	held += first->held;
	list_add(&bins[bin_of(len)], page);
}

static void free_remove(uint32_t page)
{
	held -= heap_tags[page].held;
	list_remove(&bins[bin_of(heap_tags[page].len)], page);
}

/* ---- Runs ------------------------------------------------------------------------------------ */

static uint32_t find(uint32_t len, uint32_t look)
{
	unsigned int bin;
	uint32_t page, n;

	for (bin = bin_of(len); bin < BINS; bin++) {
		for (page = bins[bin], n = 0; page && n < look; page = heap_tags[page].next, n++) {
			if (heap_tags[page].len >= len)
				return page;
		}
	}
	return 0;
}

/* Room at the end: of the last run, if that is free, and of what was never used. */
static uint32_t extend(uint32_t len)
{
	uint32_t page = top, has = 0, may_hold = 0;

	if (heap_tags[top - 1].kind == FREE) {
		has = heap_tags[top - 1].len;
		page = top - has;
		may_hold = heap_tags[page].held;
	}
	if (len > PAGES - page)
		return 0;
	if (has)
		free_remove(page);
	top = page + len;
	free_add(page, len, may_hold);
	return page;
}

static void is_taken(uint32_t page, uint32_t len)
{
	struct tag *first = &heap_tags[page], *last = &heap_tags[page + len - 1];

	first->kind = last->kind = WHOLE;
	first->len = last->len = len;
}

uint32_t run_take(uint32_t len, size_t alignment, bool *zeroed)
{
	size_t more = alignment > PAGE ? (alignment >> PAGE_SHIFT) - 1 : 0;
	uint32_t page, all, before, after, may_hold;
	uintptr_t at;

	if (!heap_begin() || !len || len >= PAGES || more >= PAGES - len)
		return 0;
	all = len + (uint32_t)more;
	page = find(all, LOOK);
	if (!page)
		page = extend(all);
	if (!page)
		page = find(all, UINT32_MAX);
	if (!page)
		return 0;
	may_hold = heap_tags[page].held;
	all = heap_tags[page].len;
	free_remove(page);
	at = (uintptr_t)address_of(page);
	before = (uint32_t)((((at + alignment - 1) & ~(alignment - 1)) - at) >> PAGE_SHIFT);
	after = all - before - len;
	is_taken(page + before, len);
	if (before)
		free_add(page, before, may_hold);
	if (after)
		free_add(page + before + len, after, may_hold);
	*zeroed = !may_hold;
	return page + before;
}

static void empty_all(void)
{
	unsigned int bin;
	uint32_t page;

	for (bin = 0; bin < BINS; bin++) {
		for (page = bins[bin]; page; page = heap_tags[page].next) {
			if (heap_tags[page].held && pages_empty(page, heap_tags[page].len)) {
				held -= heap_tags[page].held;
				heap_tags[page].held = 0;
			}
		}
	}
}

void run_give(uint32_t page, uint32_t len, uint32_t may_hold)
{
	uint32_t next = page + len, before = held;

	if (next < top && heap_tags[next].kind == FREE) {
		may_hold += heap_tags[next].held;
		len += heap_tags[next].len;
		free_remove(next);
	}
	if (heap_tags[page - 1].kind == FREE) {
		page -= heap_tags[page - 1].len;
		may_hold += heap_tags[page].held;
		len += heap_tags[page].len;
		free_remove(page);
	}
	free_add(page, len, may_hold);
	/* Where pages cannot be emptied, it is tried once for each KEPT of them. */
	if (held / KEPT > before / KEPT)
		empty_all();
}

bool run_grow(uint32_t page, uint32_t more)
{
	uint32_t len = heap_tags[page].len, next = page + len, has, may_hold;

	if (next == top) {
		if (more > PAGES - top)
			return false;
		top += more;
		is_taken(page, len + more);
		return true;
	}
	if (heap_tags[next].kind != FREE || heap_tags[next].len < more)
		return false;
	has = heap_tags[next].len;
	may_hold = heap_tags[next].held;
	free_remove(next);
	is_taken(page, len + more);
	if (has > more)
		free_add(next + more, has - more, may_hold);
	return true;
}

void run_cut(uint32_t page, uint32_t len)
{
	uint32_t rest = heap_tags[page].len - len;

	is_taken(page, len);
	run_give(page + len, rest, rest);
}

/* ---- fork() ---------------------------------------------------------------------------------- */

static bool copy_part(size_t from, size_t to)
{
	ssize_t n;

	if (spare) {
		memcpy(spare + from, heap_base + from, to - from);
		return true;
	}
	for (; from < to; from += (size_t)n) {
		n = KERNEL(pwrite64, copy, heap_base + from, to - from, (off_t)from);
		if (n <= 0)
			return false;
	}
	return true;
}

/* What these bytes of the file hold; the next that hold something are from `*data` on. */
static bool copy_bytes(int from_file, size_t from, size_t to, size_t *data)
{
	size_t end = to;
	off_t at;

	while (from < to) {
		if (from_file >= 0 && *data <= from) {
			/* ENXIO: nothing more. */
			at = KERNEL(lseek, from_file, (off_t)from, SEEK_DATA);
			*data = at < 0 ? HEAP : (size_t)at;
		}
		if (from_file >= 0 && *data >= to)
			return true;
		if (*data > from)
			from = *data;
		if (from_file >= 0) {
			at = KERNEL(lseek, from_file, (off_t)from, SEEK_HOLE);
			end = at >= 0 && (size_t)at < to ? (size_t)at : to;
		}
		if (!copy_part(from, end))
			return false;
		from = end;
	}
	return true;
}

static bool copy_used(void)
{
	int from_file = heap_file();
	uint32_t page = 1, first;
	size_t data = 0;

	while (page < top) {
		for (first = page; page < top && heap_tags[page].kind != FREE;)
			page += heap_tags[page].len;
		if (!copy_bytes(from_file, (size_t)first << PAGE_SHIFT, (size_t)page << PAGE_SHIFT,
				&data))
			return false;
		if (page < top)
			page += heap_tags[page].len;
	}
	return true;
}

void heap_copy(void)
{
	void *memory;

	if (!heap_base || is_private)
		return;
	copy = new_file();
	if (copy >= 0 && copy_used())
		return;
	/* No descriptor is left, or a file may not be so large: the child's heap is not shared. */
	if (copy >= 0)
		KERNEL(close, copy);
	copy = -1;
	memory = mmap(NULL, HEAP, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	spare = memory == MAP_FAILED ? NULL : memory;
	if (spare)
		copy_used();
}

void heap_drop_copy(void)
{
	if (copy >= 0)
		KERNEL(close, copy);
	if (spare)
		munmap(spare, HEAP);
	copy = -1;
	spare = NULL;
}

bool heap_become_copy(void)
{
	bool done = !heap_base || is_private;

	if (copy >= 0) {
		done = mmap(heap_base, HEAP, PROT_READ | PROT_WRITE,
			    MAP_SHARED | MAP_FIXED | MAP_NORESERVE, copy, 0) != MAP_FAILED;
	} else if (spare) {
		done = mremap(spare, HEAP, HEAP, MREMAP_MAYMOVE | MREMAP_FIXED, heap_base) !=
		       MAP_FAILED;
		is_private = done;
	} else {
		return done;
	}
	if (heap_file() >= 0)
		KERNEL(close, file);
	if (copy >= 0)
		is_now(copy);
	else
		file = -1;
	copy = -1;
	spare = NULL;
	return done;
}
