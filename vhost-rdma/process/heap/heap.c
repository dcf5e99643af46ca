// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * A heap in shared memory: malloc(3) and its friends over one memfd, for programs that register
 * what they allocate. Preloaded, never linked. VHOST_RDMA_SHARED_HEAP=0 leaves a program's heap
 * what it is though this is loaded.
 *
 * A block of up to 32 KiB has one of 40 sizes, and lies with others of its size in a run of pages;
 * what is larger is a run of pages itself (pages.c). What the heap has no room for is the C
 * library's: it works as any memory does that is not shared.
 *
 * A forked child may not share its parent's heap: what it wrote would be there too. So fork copies
 * what is in use to a file of the child's, which the child maps in its place; to memory of its own,
 * which is not shared, where no file is to be had.
 */
#define _GNU_SOURCE
#include "heap.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define CLASSES 40
#define SMALL ((size_t)32 << 10)
#define LARGE ((size_t)4 << 20)
#define CHILD_FAILS "vhost-rdma: no memory for a child's copy of the shared heap\n"
#define BAD_POINTER "vhost-rdma: free() of what malloc() did not give\n"

/* The C library's own, by names that nothing stands for (glibc, since 2.2.5). */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *ptr, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *ptr);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Runs of a class with a free block. */
static uint32_t with_room[CLASSES];

/* For the provider: where the heap is, and its file. */
EXPORT int vrdma_heap(void **start, size_t *len)
{
	*start = heap_base;
	*len = HEAP;
	return heap_base ? heap_file() : -1;
}

/* ---- Sizes ----------------------------------------------------------------------------------- */

/* Multiples of 16 up to 128, then four to a power of two. */
static unsigned int class_of(size_t size)
{
	unsigned int log;
	size_t step;

	if (size <= 128)
		return size ? (unsigned int)((size - 1) / 16) : 0;
	log = 63 - (unsigned int)__builtin_clzll(size - 1);
	step = (size_t)1 << (log - 2);
	return 8 + 4 * (log - 7) + (unsigned int)((size - ((size_t)1 << log) - 1) / step);
}

static size_t size_of(unsigned int class)
{
	unsigned int log = 7 + (class - 8) / 4;

	if (class < 8)
		return 16 * ((size_t)class + 1);
	return ((size_t)1 << log) + ((class - 8) % 4 + 1) * ((size_t)1 << (log - 2));
}

/* Pages for eight blocks or more, with no more than an eighth of them left over. */
static uint32_t pages_for(unsigned int class)
{
	size_t size = size_of(class), len = PAGE;

	while (len < 8 * size || len % size * 8 > len)
		len += PAGE;
	return (uint32_t)(len >> PAGE_SHIFT);
}

static size_t whole_pages(size_t size)
{
	return (size + PAGE - 1) >> PAGE_SHIFT;
}

/* ---- Blocks; all with the lock held ---------------------------------------------------------- */

static uint8_t *block_at(uint32_t run, uint32_t index)
{
	return address_of(run) + index * size_of(heap_tags[run].class);
}

static uint32_t new_parts(unsigned int class)
{
	uint32_t len = pages_for(class), i, run;
	bool zeroed;

	run = run_take(len, PAGE, &zeroed);
	if (!run)
		return 0;
	for (i = run; i < run + len; i++) {
		heap_tags[i].kind = PARTS;
		heap_tags[i].head = run;
	}
	heap_tags[run].class = (uint8_t)class;
	heap_tags[run].blocks = (uint32_t)(((size_t)len << PAGE_SHIFT) / size_of(class));
	heap_tags[run].used = heap_tags[run].carved = heap_tags[run].first = 0;
	list_add(&with_room[class], run);
	return run;
}

static void *take_small(unsigned int class)
{
	uint32_t run = with_room[class];
	struct tag *tag;
	uint8_t *block;

	if (!run)
		run = new_parts(class);
	if (!run)
		return NULL;
	tag = &heap_tags[run];
	if (tag->first) {
		block = block_at(run, tag->first - 1);
		memcpy(&tag->first, block, sizeof(tag->first));
	} else {
		block = block_at(run, tag->carved++);
	}
	if (++tag->used == tag->blocks)
		list_remove(&with_room[class], run);
	return block;
}

static void give_small(void *ptr, uint32_t run, uint32_t index)
{
	struct tag *tag = &heap_tags[run];
	uint32_t *list = &with_room[tag->class];

	if (tag->used == tag->blocks)
		list_add(list, run);
	memcpy(ptr, &tag->first, sizeof(tag->first));
	tag->first = index + 1;
	/* One stays, for who frees and takes a single block again and again. */
	if (!--tag->used && (tag->next || tag->prev)) {
		list_remove(list, run);
		run_give(run, tag->len, tag->len);
	}
}

static void refuse(void)
{
	KERNEL(write, STDERR_FILENO, BAD_POINTER, sizeof(BAD_POINTER) - 1);
	abort();
}

/* The run that a block is of, and its number there. What is no block ends the program. */
static uint32_t run_of(const void *ptr, uint32_t *index)
{
	uint32_t page = page_of(ptr), run = page;
	size_t at;

	*index = 0;
	if (heap_tags[page].kind == PARTS)
		run = heap_tags[page].head;
	else if (heap_tags[page].kind != WHOLE)
		refuse();
	at = (size_t)((const uint8_t *)ptr - address_of(run));
	if (heap_tags[run].kind == PARTS) {
		*index = (uint32_t)(at / size_of(heap_tags[run].class));
		at %= size_of(heap_tags[run].class);
	}
	if (at)
		refuse();
	return run;
}

/* ---- malloc(3) ------------------------------------------------------------------------------- */

/* A block of the heap; NULL: there is no room. */
static void *take(size_t alignment, size_t size, bool *zeroed)
{
	void *block = NULL;
	unsigned int class;
	uint32_t run;

	*zeroed = false;
	if (alignment <= PAGE && size < alignment && alignment > 16)
		size = alignment;
	if (alignment <= PAGE && size <= SMALL) {
		class = class_of(size);
		/* Runs begin at a page; powers of two are among the sizes. */
		while (size_of(class) % alignment)
			class++;
		pthread_mutex_lock(&lock);
		block = heap_begin() ? take_small(class) : NULL;
		pthread_mutex_unlock(&lock);
	} else if (size < HEAP) {
		pthread_mutex_lock(&lock);
		run = run_take((uint32_t)whole_pages(size ? size : 1), alignment, zeroed);
		block = run ? address_of(run) : NULL;
		pthread_mutex_unlock(&lock);
	}
	return block;
}

static void *allocate(size_t alignment, size_t size)
{
	int before = errno;
	bool zeroed;
	void *block = take(alignment, size, &zeroed);

	errno = before;
	if (block)
		return block;
	return alignment > 16 ? __libc_memalign(alignment, size) : __libc_malloc(size);
}

EXPORT void *malloc(size_t size)
{
	return allocate(16, size);
}

EXPORT void free(void *ptr)
{
	uint32_t run, index, len, may_hold;
	int before = errno;

	if (!ptr)
		return;
	if (!is_in_heap(ptr)) {
		__libc_free(ptr);
		return;
	}
	run = run_of(ptr, &index);
	if (heap_tags[run].kind == PARTS) {
		pthread_mutex_lock(&lock);
		give_small(ptr, run, index);
		pthread_mutex_unlock(&lock);
	} else {
		/* The block is still the caller's: nobody has to wait. */
		len = may_hold = heap_tags[run].len;
		if (len >= KEPT / 2 && pages_empty(run, len))
			may_hold = 0;
		pthread_mutex_lock(&lock);
		run_give(run, len, may_hold);
		pthread_mutex_unlock(&lock);
	}
	errno = before;
}

EXPORT void *calloc(size_t count, size_t size)
{
	int before = errno;
	bool zeroed;
	size_t bytes;
	void *ptr;

	if (__builtin_mul_overflow(count, size, &bytes)) {
		errno = ENOMEM;
		return NULL;
	}
	ptr = take(16, bytes, &zeroed);
	/* Of a large block most pages may hold nothing, and had to be made to be written to. */
	if (ptr && !zeroed && bytes >= LARGE)
		zeroed = pages_empty(page_of(ptr), (uint32_t)whole_pages(bytes));
	errno = before;
	if (!ptr)
		return __libc_calloc(count, size);
	return zeroed ? ptr : memset(ptr, 0, bytes);
}

static size_t room(const void *ptr)
{
	uint32_t index, run = run_of(ptr, &index);
	const struct tag *tag = &heap_tags[run];

	return tag->kind == PARTS ? size_of(tag->class) : (size_t)tag->len << PAGE_SHIFT;
}

/* Makes a block of pages longer or shorter where it is. */
static bool resize(void *ptr, size_t size)
{
	uint32_t run = page_of(ptr), len = heap_tags[run].len, wanted;
	bool done = true;

	if (heap_tags[run].kind != WHOLE || size <= SMALL || size >= HEAP)
		return false;
	wanted = (uint32_t)whole_pages(size);
	pthread_mutex_lock(&lock);
	if (wanted > len)
		done = run_grow(run, wanted - len);
	else if (wanted < len)
		run_cut(run, wanted);
	pthread_mutex_unlock(&lock);
	return done;
}

EXPORT void *realloc(void *ptr, size_t size)
{
	size_t has;
	void *other;

	if (!ptr)
		return malloc(size);
	if (!is_in_heap(ptr))
		return __libc_realloc(ptr, size);
	if (!size) {
		free(ptr);
		return NULL;
	}
	has = room(ptr);
	if (resize(ptr, size) || (size <= has && (size > has / 2 || has <= 64)))
		return ptr;
	other = malloc(size);
	/* What need not move may stay. */
	if (!other)
		return size <= has ? ptr : NULL;
	memcpy(other, ptr, size < has ? size : has);
	free(ptr);
	return other;
}

EXPORT void *memalign(size_t alignment, size_t size)
{
	if (!alignment || alignment & (alignment - 1)) {
		errno = EINVAL;
		return NULL;
	}
	return allocate(alignment < 16 ? 16 : alignment, size);
}

EXPORT void *aligned_alloc(size_t alignment, size_t size)
{
	return memalign(alignment, size);
}

EXPORT int posix_memalign(void **ptr, size_t alignment, size_t size)
{
	int before = errno;
	void *made;

	if (alignment % sizeof(void *) || !alignment || alignment & (alignment - 1))
		return EINVAL;
	made = memalign(alignment, size);
	errno = before;
	if (!made)
		return ENOMEM;
	*ptr = made;
	return 0;
}

EXPORT void *valloc(size_t size)
{
	return memalign(PAGE, size);
}

EXPORT void *pvalloc(size_t size)
{
	size_t whole;

	if (__builtin_add_overflow(size, PAGE - 1, &whole)) {
		errno = ENOMEM;
		return NULL;
	}
	return memalign(PAGE, whole & ~(PAGE - 1));
}

EXPORT size_t malloc_usable_size(void *ptr)
{
	static size_t (*of_libc)(void *ptr);

	if (!ptr)
		return 0;
	if (is_in_heap(ptr))
		return room(ptr);
	if (!of_libc)
		of_libc = (size_t (*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
	return of_libc ? of_libc(ptr) : 0;
}

/* ---- fork() ---------------------------------------------------------------------------------- */

static void before_fork(void)
{
	pthread_mutex_lock(&lock);
	heap_copy();
}

static void in_parent(void)
{
	heap_drop_copy();
	pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
	/* Without a copy the child would write into its parent's memory. */
	if (!heap_become_copy()) {
		KERNEL(write, STDERR_FILENO, CHILD_FAILS, sizeof(CHILD_FAILS) - 1);
		_exit(127);
	}
	pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void at_fork(void)
{
	pthread_atfork(before_fork, in_parent, in_child);
}
