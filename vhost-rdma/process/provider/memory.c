// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Memory that the device can reach: files that cannot shrink, which both sides map.
 *
 * Rings come from pieces of our own, which all sessions share; doorbell pages are a session's alone
 * (kernel.c). Memory of the program is reached as it is where it lies in the shared heap
 * (process/heap), which tells where it is, or in shared files (loan.h); all other has a shadow
 * (private.h). Nothing of either
 * goes to a child of fork(): the heap sees to its own.
 *
 * What is given counts as if all of it were used: the device may touch it. The heap is far larger
 * than most programs need, and grows from its beginning, so it is given in parts, each as large as
 * all before it.
 */
#define _GNU_SOURCE
#include "virtio_rdma.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "session.h"

#define PIECE ((size_t)16 << 20)
#define HEAP_PIECE ((size_t)64 << 20)
#define PAGE ((size_t)4096)
#define BITS (PIECE / PAGE)

/* A piece of our own. One that is larger than PIECE is one allocation. */
struct shared {
	struct shared *next;
	uint8_t *base;
	size_t len;
	struct vrdma_file file;
	int taken;	/* of a large one, by its allocation */
	uint8_t used[BITS];
};

static pthread_mutex_t shared_lock = PTHREAD_MUTEX_INITIALIZER;
static struct shared *all;

/* -1 and errno where there is none. */
int vrdma_sealed_file(size_t len)
{
	int fd = memfd_create("vhost-rdma", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0)
		return -1;
	if (ftruncate(fd, (off_t)len) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) {
		close(fd);
		return -1;
	}
	return fd;
}

/* Why there is none: a full table of descriptors is the program's to mend. */
int vrdma_no_file(void)
{
	return errno == EMFILE || errno == ENFILE ? errno : ENOMEM;
}

static struct shared *new_piece(size_t len)
{
	struct shared *piece = calloc(1, sizeof(*piece));
	int fd;

	if (!piece)
		return NULL;
	piece->len = len;
	fd = vrdma_sealed_file(piece->len);
	if (fd < 0)
		goto err;
	piece->file = vrdma_file_of(fd);
	piece->base = mmap(NULL, piece->len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (piece->base == MAP_FAILED)
		goto err_fd;
	madvise(piece->base, piece->len, MADV_DONTFORK);
	piece->next = all;
	all = piece;
	return piece;

err_fd:
	close(fd);
err:
	free(piece);
	return NULL;
}

static void *alloc_in(struct shared *piece, size_t pages)
{
	size_t run = 0, i;

	/* What the program has closed cannot be given to another session. */
	if (piece->len > PIECE || !vrdma_file_is_ours(&piece->file))
		return NULL;
	for (i = 0; i < BITS; i++) {
		run = piece->used[i] ? 0 : run + 1;
		if (run == pages) {
			memset(&piece->used[i + 1 - pages], 1, pages);
			return piece->base + (i + 1 - pages) * PAGE;
		}
	}
	return NULL;
}

/*
 * The smallest large piece that is free and has room. What sessions were given they keep, so a
 * piece that was made once serves all large rings that come after: rings double in size, and no
 * program has more pieces than it has large rings at one time, but for a few of smaller sizes.
 */
static struct shared *free_large(size_t len)
{
	struct shared *piece, *best = NULL;

	for (piece = all; piece; piece = piece->next) {
		if (piece->len > PIECE && !piece->taken && piece->len >= len &&
		    (!best || piece->len < best->len) && vrdma_file_is_ours(&piece->file))
			best = piece;
	}
	return best;
}

static void *alloc_large(size_t len)
{
	struct shared *piece = free_large(len);

	if (!piece)
		piece = new_piece(len);
	if (!piece)
		return NULL;
	piece->taken = 1;
	return piece->base;
}

static void *alloc_small(size_t pages)
{
	struct shared *piece;
	void *addr = NULL;

	for (piece = all; piece && !addr; piece = piece->next)
		addr = alloc_in(piece, pages);
	if (addr)
		return addr;
	piece = new_piece(PIECE);
	return piece ? alloc_in(piece, pages) : NULL;
}

/* Zeroed, page-aligned; NULL and errno where there is none. */
void *vrdma_pages_alloc(size_t len)
{
	size_t pages = (len + PAGE - 1) / PAGE;
	void *addr;

	pthread_mutex_lock(&shared_lock);
	addr = pages > BITS ? alloc_large(pages * PAGE) : alloc_small(pages);
	pthread_mutex_unlock(&shared_lock);
	if (!addr)
		errno = ENOMEM;
	return addr;
}

/* 1 if the range is ours. Pieces stay, for the next ring. */
int vrdma_pages_free(void *addr, size_t len)
{
	struct shared *piece;
	size_t at;

	pthread_mutex_lock(&shared_lock);
	for (piece = all; piece; piece = piece->next) {
		at = (size_t)((uint8_t *)addr - piece->base);
		if (at < piece->len)
			break;
	}
	if (piece) {
		/*
		 * The next user finds zeroes, and the host has its memory back. By the mapping: the
		 * descriptor may be another file's by now. Not so of locked memory (mlockall(2)).
		 */
		len = (len + PAGE - 1) / PAGE * PAGE;
		if (madvise(addr, len, MADV_REMOVE))
			memset(addr, 0, len);
		if (piece->len > PIECE)
			piece->taken = 0;
		else
			memset(&piece->used[at / PAGE], 0, len / PAGE);
	}
	pthread_mutex_unlock(&shared_lock);
	return !!piece;
}

void vrdma_pages_before_fork(void)
{
	pthread_mutex_lock(&shared_lock);
}

/*
 * A child has none of the pieces (MADV_DONTFORK): their files would only keep the memory. What
 * tells of them is not freed, since malloc may not be ready for a child yet.
 */
void vrdma_pages_after_fork(int in_child)
{
	struct shared *piece;

	if (in_child) {
		for (piece = all; piece; piece = piece->next)
			vrdma_file_close(&piece->file);
		all = NULL;
	}
	pthread_mutex_unlock(&shared_lock);
}

/* Memory that can be given, or is: a part of a file that is open for as long as the process is. */
struct part {
	uint8_t *base;
	size_t len;
	int fd;
	size_t offset;
};

/* The part of the program's shared heap, if it was started with one. */
static int heap_of(uintptr_t addr, struct part *part)
{
	static int (*heap)(void **base, size_t *len);
	static int looked;
	size_t at, whole, len = HEAP_PIECE, offset = 0;
	void *start;
	int fd;

	if (!looked) {
		heap = (int (*)(void **, size_t *))dlsym(RTLD_DEFAULT, "vrdma_heap");
		looked = 1;
	}
	if (!heap)
		return 0;
	fd = heap(&start, &whole);
	at = addr - (uintptr_t)start;
	if (fd < 0 || at >= whole)
		return 0;
	while (at - offset >= len) {
		offset += len;
		len = offset;
	}
	if (len > whole - offset)
		len = whole - offset;
	*part = (struct part){ (uint8_t *)start + offset, len, fd, offset };
	return 1;
}

/* Whether an address is in a piece of our own, which is no memory of the program's. */
int vrdma_is_own(const void *addr)
{
	struct shared *piece;

	pthread_mutex_lock(&shared_lock);
	for (piece = all; piece; piece = piece->next) {
		if ((uintptr_t)addr - (uintptr_t)piece->base < piece->len)
			break;
	}
	pthread_mutex_unlock(&shared_lock);
	return !!piece;
}

/* The part that an address lies in. */
static int part_of(uintptr_t addr, struct part *part)
{
	struct shared *piece;

	pthread_mutex_lock(&shared_lock);
	for (piece = all; piece; piece = piece->next) {
		if (addr - (uintptr_t)piece->base < piece->len) {
			if (!vrdma_file_is_ours(&piece->file))
				piece = NULL;
			else
				*part = (struct part){ piece->base, piece->len, piece->file.fd, 0 };
			break;
		}
	}
	pthread_mutex_unlock(&shared_lock);
	return piece || heap_of(addr, part);
}

static int is_known(const struct vrdma_session *session, uintptr_t addr)
{
	const struct vrdma_piece *piece;

	for (piece = session->pieces; piece; piece = piece->next) {
		if (addr - piece->base < piece->len)
			return 1;
	}
	return 0;
}

static int add(struct vrdma_session *session, const struct part *part)
{
	__le64 body[3] = { htole64((uintptr_t)part->base), htole64(part->len),
			   htole64(part->offset) };
	struct vrdma_request request = { VRDMA_MEMORY_ADD, body, sizeof(body), part->fd };
	struct vrdma_answer answer = {};

	return vrdma_ask(session, &request, &answer);
}

int vrdma_memory_add(struct vrdma_session *session, void *base, size_t len, int fd,
		     uint64_t offset)
{
	struct part whole = { base, len, fd, offset };

	return add(session, &whole);
}

void vrdma_memory_remove(struct vrdma_session *session, void *base, size_t len)
{
	__le64 body[3] = { htole64((uintptr_t)base), htole64(len), 0 };
	struct vrdma_request request = { VRDMA_MEMORY_REMOVE, body, sizeof(body), -1 };
	struct vrdma_answer answer = {};

	(void)vrdma_ask(session, &request, &answer);
}

static int tell(struct vrdma_session *session, const struct part *part)
{
	struct vrdma_piece *piece = calloc(1, sizeof(*piece));
	int ret;

	if (!piece)
		return ENOMEM;
	ret = add(session, part);
	if (ret) {
		free(piece);
		return ret;
	}
	piece->base = (uintptr_t)part->base;
	piece->len = part->len;
	piece->next = session->pieces;
	session->pieces = piece;
	return 0;
}

int vrdma_share(struct vrdma_session *session, const void *addr, size_t len)
{
	uintptr_t at = (uintptr_t)addr, end = at + len;
	struct part part;
	int ret = 0;

	if (!session)
		return EIO;
	vrdma_tables_lock(session);
	while (at < end && !ret) {
		if (!part_of(at, &part)) {
			ret = EFAULT;
			break;
		}
		if (!is_known(session, at))
			ret = tell(session, &part);
		at = (uintptr_t)part.base + part.len;
	}
	vrdma_tables_unlock(session);
	return ret;
}

/* Contiguous in this process, so contiguous for the device. */
struct virtio_rdma_page_list vrdma_list(const void *addr, size_t len)
{
	uintptr_t first = (uintptr_t)addr & ~(PAGE - 1), offset = (uintptr_t)addr - first;
	struct virtio_rdma_page_list list = {
		.addr = htole64(first),
		.npages = htole32((uint32_t)((offset + len + PAGE - 1) / PAGE)),
		.offset = htole32((uint32_t)offset),
		.page_shift = 12,
	};

	return list;
}
