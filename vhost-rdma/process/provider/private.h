/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * Private memory: what a program registers and the device cannot map, as it has no file of shared
 * memory (loan.h).
 *
 * A region over it has a *shadow*, shared memory of two halves (docs/virtio-rdma-process.md, 4):
 * bytes that arrive come into the first, the *in* half, and bytes that leave go from the second,
 * the *out* half. This library alone copies between a shadow and the memory: where the program
 * posts and polls (mirror.c), and for accesses of peers in a thread that does the device's jobs
 * (jobs.c). Nothing is pinned, so the limit of locked memory does not matter.
 */
#ifndef VRDMA_PRIVATE_H
#define VRDMA_PRIVATE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "session.h"

struct vrdma_ground;
struct vrdma_kept;

/* Pages for the two halves. */
struct vrdma_shadow {
	struct vrdma_shadow *next;	/* of the same ground, by address */
	struct vrdma_ground *ground;
	uint8_t *base;
	size_t len;
};

struct vrdma_region {
	struct vrdma_region *next;	/* of the same bucket */
	struct vrdma_shadow shadow;
	uint32_t key;
	uint32_t users;			/* copies that are under way */
	uint64_t iova;
	uint8_t *memory;		/* the program's */
	size_t len;
	uint8_t *in;
	size_t half;			/* from a byte of `in` to the same byte of `out` */
};

/* What a context with private memory has. */
struct vrdma_mirror {
	/* For the data path: held for a look at the table, never while something is copied. */
	pthread_spinlock_t lock;
	struct vrdma_region **buckets;
	uint32_t mask;
	uint32_t count;
	/* Receives that an SRQ's ring may have no more when they complete. */
	pthread_mutex_t kept_lock;
	struct vrdma_kept **kept;
	uint32_t kept_mask;
	uint32_t kept_count;
	/* Under the session's `tables`. */
	struct vrdma_ground *grounds;
	struct vrdma_file jobs;		/* where the device's jobs come from */
	pid_t pid;
	pthread_t worker;
};

/* What a registration tells the device. */
struct vrdma_cover {
	struct virtio_rdma_page_list pages;
	uint64_t length;
	uint32_t access;
	struct vrdma_region *region;	/* of private memory, else NULL */
	struct vrdma_loan *loan;	/* of files of the program's, else NULL */
};

/* private.c */
int vrdma_cover(struct vrdma_session *session, const void *addr, size_t len, int access,
		struct vrdma_cover *cover);
int vrdma_cover_keep(struct vrdma_session *session, const struct vrdma_cover *cover, uint32_t key,
		     uint64_t iova);
void vrdma_cover_drop(struct vrdma_session *session, const struct vrdma_cover *cover);
int vrdma_is_private(struct vrdma_session *session, uint32_t key);
/* A key's region is gone, or is another's; most are of shared memory. */
void vrdma_private_forget(struct vrdma_session *session, uint32_t key);
void vrdma_private_end(struct vrdma_session *session);
void vrdma_private_in_child(struct vrdma_session *session);

/* The region of a key, which stays until it is put; NULL: it is of shared memory, or none. */
struct vrdma_region *vrdma_region_get(struct vrdma_mirror *mirror, uint32_t key);

static inline void vrdma_region_put(struct vrdma_region *region)
{
	__atomic_fetch_sub(&region->users, 1, __ATOMIC_RELEASE);
}

/* Where a range begins in a region, if the program has registered all of it. */
static inline int vrdma_inside(const struct vrdma_region *region, uint64_t addr, uint64_t len,
			       size_t *at)
{
	*at = addr - region->iova;
	return *at <= region->len && len <= region->len - *at;
}

/* jobs.c */
int vrdma_jobs_begin(struct vrdma_session *session, struct vrdma_mirror *mirror);
void vrdma_jobs_end(struct vrdma_mirror *mirror);

/* mirror.c: an SRQ is gone, or (NULL) all are. */
struct vrdma_wq;
void vrdma_kept_forget(struct vrdma_mirror *mirror, const struct vrdma_wq *of);

#endif
