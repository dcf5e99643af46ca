/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * The shared heap's memory: one file, mapped whole, of which runs of pages are taken and given
 * back. Everything here is called with the heap's lock held, but for what says that it is not.
 */
#ifndef VRDMA_HEAP_H
#define VRDMA_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/*
 * Calls of descriptors are the kernel's own: another library that is preloaded may stand in the
 * place of the C library's (librspreload does for close() and fcntl()), and allocate, which nobody
 * can while the heap's lock is held.
 */
#define KERNEL(name, ...) syscall(SYS_##name, __VA_ARGS__)

#define PAGE_SHIFT 12
#define PAGE ((size_t)1 << PAGE_SHIFT)
#define HEAP ((size_t)4 << 30)
#define PAGES ((uint32_t)(HEAP >> PAGE_SHIFT))
/* Free pages that may still hold something: no more than 32 MiB are kept so. */
#define KEPT ((uint32_t)8192)

enum kind {
	INSIDE,			/* of a run, or never used */
	FREE,
	WHOLE,			/* a run that is one block */
	PARTS,			/* a run of blocks of one size */
};

/*
 * What is known of a page. The first and the last page of a run tell of the run; all pages of PARTS
 * say where it begins. Page 0 is never used: 0 is "none".
 */
struct tag {
	uint32_t len;		/* pages of the run */
	uint32_t head;		/* PARTS: its first page */
	uint32_t next, prev;	/* in a list */
	uint32_t held;		/* FREE: pages that may hold something; 0: all read as zeroes */
	uint32_t blocks;	/* PARTS: how many there are, */
	uint32_t used;		/*  that are in use, */
	uint32_t carved;	/*  that ever were, */
	uint32_t first;		/*  and the first free one of those, plus one */
	uint8_t kind;
	uint8_t class;
};

extern uint8_t *heap_base;
extern struct tag *heap_tags;

/* Puts a run at the beginning of a list; takes it out. */
void list_add(uint32_t *list, uint32_t page);
void list_remove(uint32_t *list, uint32_t page);

/* Makes the heap, if there is none yet; false if there is to be none. */
bool heap_begin(void);
/* The heap's file, or -1. Needs no lock. */
int heap_file(void);

/* A run at this alignment in bytes, 0 if there is none; whether it reads as zeroes. */
uint32_t run_take(uint32_t len, size_t alignment, bool *zeroed);
/* Gives one back, of which so many pages may hold something. */
void run_give(uint32_t page, uint32_t len, uint32_t held);
/* Lengthens a run where it is. */
bool run_grow(uint32_t page, uint32_t more);
/* Gives back what is behind so many of its pages. */
void run_cut(uint32_t page, uint32_t len);
/* Empties pages; needs no lock. False: they hold what they held. */
bool pages_empty(uint32_t page, uint32_t len);

/* Before fork(), a copy of all that is in use; then its end, or what makes it the child's heap. */
void heap_copy(void);
void heap_drop_copy(void);
bool heap_become_copy(void);

static inline bool is_in_heap(const void *ptr)
{
	const uint8_t *base = __atomic_load_n(&heap_base, __ATOMIC_ACQUIRE);

	return base && (uintptr_t)ptr - (uintptr_t)base < HEAP;
}

static inline uint8_t *address_of(uint32_t page)
{
	return heap_base + ((size_t)page << PAGE_SHIFT);
}

static inline uint32_t page_of(const void *ptr)
{
	return (uint32_t)(((uintptr_t)ptr - (uintptr_t)heap_base) >> PAGE_SHIFT);
}

#endif
