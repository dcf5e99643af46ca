// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * A heap in shared memory: malloc(3) and its friends over one memfd, for programs that register
 * what they allocate (VHOST_RDMA_SHARED_HEAP). Preloaded, never linked.
 *
 * Blocks have powers of two as sizes, each with a list of free ones; a block knows its size by the
 * 16 bytes before it. Large blocks give their pages back when they are free.
 *
 * A forked child may not share its parent's heap: what it wrote would be there too. So fork copies
 * what is in use to a file of the child's, which the child maps in its place.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define HEAP ((size_t)4 << 30)
#define CLASSES 40
#define SMALLEST 5		/* 32 bytes, header included */
#define LARGE 17		/* from 128 KiB on pages go back */

struct head {
	uint32_t class;
	uint32_t reserved;
	uintptr_t block;	/* where the block begins: aligned ones have room before the head */
};

struct free_block {
	struct free_block *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t *base;
static size_t top;
static int fd = -1, copy = -1;
static struct free_block *lists[CLASSES];

static int new_file(void)
{
	int file = memfd_create("vhost-rdma-heap", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (file >= 0 && (ftruncate(file, HEAP) ||
			  fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))) {
		close(file);
		file = -1;
	}
	return file;
}

static int begin(void)
{
	if (base)
		return 0;
	fd = new_file();
	if (fd < 0)
		return -1;
	base = mmap(NULL, HEAP, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	if (base == MAP_FAILED) {
		base = NULL;
		return -1;
	}
	return 0;
}

/* For the provider: where the heap is, and its file. */
EXPORT int vrdma_heap(void **start, size_t *len)
{
	*start = base;
	*len = HEAP;
	return fd;
}

static unsigned int class_of(size_t size)
{
	unsigned int class = SMALLEST;

	while (class < CLASSES && ((size_t)1 << class) < size)
		class++;
	return class;
}

static void *take(unsigned int class)
{
	size_t size = (size_t)1 << class, at;
	struct free_block *block = lists[class];

	if (block) {
		lists[class] = block->next;
		return block;
	}
	at = (top + 15) & ~(size_t)15;
	if (class >= 12)
		at = (at + 4095) & ~(size_t)4095;
	if (begin() || size > HEAP || at > HEAP - size)
		return NULL;
	top = at + size;
	return base + at;
}

static void *allocate(size_t alignment, size_t size)
{
	size_t whole = size + sizeof(struct head) + (alignment > 16 ? alignment : 0);
	unsigned int class;
	struct head *head;
	uintptr_t at;
	void *block;

	if (whole < size) {
		errno = ENOMEM;
		return NULL;
	}
	class = class_of(whole);
	pthread_mutex_lock(&lock);
	block = class < CLASSES ? take(class) : NULL;
	pthread_mutex_unlock(&lock);
	if (!block) {
		errno = ENOMEM;
		return NULL;
	}
	at = (uintptr_t)block + sizeof(*head);
	if (alignment > 16)
		at = (at + alignment - 1) & ~(alignment - 1);
	head = (struct head *)at - 1;
	head->class = class;
	head->block = (uintptr_t)block;
	return (void *)at;
}

static size_t room(const void *ptr)
{
	const struct head *head = (const struct head *)ptr - 1;

	return ((size_t)1 << head->class) - ((uintptr_t)ptr - head->block);
}

EXPORT void *malloc(size_t size)
{
	return allocate(16, size);
}

EXPORT void free(void *ptr)
{
	struct head *head = (struct head *)ptr - 1;
	struct free_block *block;
	unsigned int class;
	int before = errno;

	if (!ptr)
		return;
	class = head->class;
	block = (struct free_block *)head->block;
	if (class >= LARGE)
		madvise(block, (size_t)1 << class, MADV_REMOVE);
	pthread_mutex_lock(&lock);
	block->next = lists[class];
	lists[class] = block;
	pthread_mutex_unlock(&lock);
	errno = before;
}

EXPORT void *calloc(size_t count, size_t size)
{
	size_t bytes;
	void *ptr;

	if (__builtin_mul_overflow(count, size, &bytes)) {
		errno = ENOMEM;
		return NULL;
	}
	ptr = malloc(bytes);
	if (ptr)
		memset(ptr, 0, bytes);
	return ptr;
}

EXPORT void *realloc(void *ptr, size_t size)
{
	void *larger;

	if (!ptr)
		return malloc(size);
	if (!size) {
		free(ptr);
		return NULL;
	}
	if (size <= room(ptr))
		return ptr;
	larger = malloc(size);
	if (!larger)
		return NULL;
	memcpy(larger, ptr, room(ptr));
	free(ptr);
	return larger;
}

EXPORT void *memalign(size_t alignment, size_t size)
{
	if (!alignment || alignment & (alignment - 1)) {
		errno = EINVAL;
		return NULL;
	}
	return allocate(alignment, size);
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
	made = allocate(alignment, size);
	errno = before;
	if (!made)
		return ENOMEM;
	*ptr = made;
	return 0;
}

EXPORT void *valloc(size_t size)
{
	return memalign(4096, size);
}

EXPORT void *pvalloc(size_t size)
{
	return memalign(4096, (size + 4095) & ~(size_t)4095);
}

EXPORT size_t malloc_usable_size(void *ptr)
{
	return ptr ? room(ptr) : 0;
}

static void before_fork(void)
{
	size_t done = 0;
	ssize_t n = 1;

	pthread_mutex_lock(&lock);
	copy = base ? new_file() : -1;
	while (copy >= 0 && done < top && n > 0) {
		n = pwrite(copy, base + done, top - done, (off_t)done);
		done += n > 0 ? (size_t)n : 0;
	}
	if (copy >= 0 && done < top) {
		close(copy);
		copy = -1;
	}
}

static void in_parent(void)
{
	if (copy >= 0)
		close(copy);
	copy = -1;
	pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
	/* Without a copy the child would write into its parent's memory. */
	if (base &&
	    (copy < 0 ||
	     mmap(base, HEAP, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
		  copy, 0) == MAP_FAILED))
		_exit(127);
	if (base) {
		close(fd);
		fd = copy;
		copy = -1;
	}
	pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void at_fork(void)
{
	pthread_atfork(before_fork, in_parent, in_child);
}
