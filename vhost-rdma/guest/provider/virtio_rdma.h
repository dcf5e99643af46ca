/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * Objects of the virtio RDMA provider.
 *
 * The provider posts and polls without the kernel: work queues and completion queues are rings in
 * this process's memory that the device reads and writes (docs/virtio-rdma.md, sections 6 and 7),
 * posts are announced by stores to doorbell pages (doorbell.h). Everything that makes, changes or
 * destroys an object goes through the kernel driver with the structures of virtio_rdma_uapi.h.
 *
 * Locks, in the order in which they nest: the CQ locks (by address where two are taken), then a
 * QP's SQ lock, then its RQ lock. A ring's `head` is written under its own lock by posts; its
 * `tail` under the lock of the CQ that completes it.
 */
#ifndef VIRTIO_RDMA_H
#define VIRTIO_RDMA_H

#include <config.h>

#include <endian.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/driver.h>
#include <infiniband/kern-abi.h>
#include <infiniband/verbs.h>
#include <util/util.h>

#include "virtio_rdma_abi.h"
#include "virtio_rdma_uapi.h"

/*
 * A lock that costs a branch where the application promised a single thread (thread domain,
 * SINGLE_THREADED CQ).
 */
struct vrdma_lock {
	pthread_spinlock_t spin;
	bool needed;
};

static inline void vrdma_lock_init(struct vrdma_lock *lock, bool needed)
{
	pthread_spin_init(&lock->spin, PTHREAD_PROCESS_PRIVATE);
	lock->needed = needed;
}

static inline void vrdma_lock(struct vrdma_lock *lock)
{
	if (lock->needed)
		pthread_spin_lock(&lock->spin);
}

static inline void vrdma_unlock(struct vrdma_lock *lock)
{
	if (lock->needed)
		pthread_spin_unlock(&lock->spin);
}

/* What a ring is for: the resource type that an allocator of the application is told. */
enum vrdma_ring {
	VRDMA_RING_QP = 1,
	VRDMA_RING_CQ,
	VRDMA_RING_SRQ,
};

/* Page-aligned zeroed memory that a forked child does not get. */
struct vrdma_buf {
	void *addr;
	size_t len;
	enum vrdma_ring ring;
	struct vrdma_pd *domain;	/* the parent domain whose allocator made it, or NULL */
};

struct vrdma_db_page {
	uint32_t number;
	void *map;
};

struct vrdma_context {
	struct verbs_context vctx;
	const void *status;		/* the NIC's status page, read-only */
	void *notify;			/* page of the kick address, or NULL: kick by ioctl */
	uint32_t notify_offset;
	uint32_t kick_queue;
	uint32_t alive;
	uint64_t caps;
	uint32_t max_inline;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_srq_sge;
	uint32_t max_qp_wr;
	uint32_t max_srq_wr;
	uint32_t max_cqe;
	size_t page_size;
	pthread_mutex_t db_mutex;	/* the table of doorbell pages */
	struct vrdma_db_page *db_pages;
	unsigned int num_db_pages;
	struct vrdma_mirror *mirror;	/* NULL, or what mirror.h copies by */
};

struct vrdma_td {
	struct ibv_td td;
	atomic_int refcount;
};

struct vrdma_pd {
	struct ibv_pd pd;
	struct vrdma_pd *contained;	/* of a parent domain */
	struct vrdma_td *td;
	/* Of a parent domain with allocators: */
	void *(*alloc)(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment,
		       uint64_t resource_type);
	void (*free)(struct ibv_pd *pd, void *pd_context, void *ptr, uint64_t resource_type);
	void *pd_context;
	atomic_int refcount;		/* parent domains of a PD, rings of a parent domain */
};

/* A queue of work requests: SQ, RQ or SRQ. Indices are free-running (section 6.4). */
struct vrdma_wq {
	struct vrdma_buf buf;
	struct vrdma_lock lock;
	uint32_t mask;			/* entries - 1 */
	uint32_t max_wr;
	uint32_t max_sge;
	uint8_t log2_stride;
	uint32_t head;			/* producer index */
	uint32_t tail;			/* slots below are free */
	uint32_t *db_index;
	uint8_t *db_summary;
};

struct vrdma_srq {
	struct verbs_srq vsrq;
	struct vrdma_wq wq;
	uint8_t *ctrl;
	uint32_t srqn;
};

struct vrdma_qp;

/* The place of a QP in the table of one CQ. */
struct vrdma_cq_link {
	struct vrdma_cq_link *next;
	struct vrdma_qp *qp;
};

struct vrdma_cq {
	struct verbs_cq vcq;
	struct vrdma_lock lock;
	struct vrdma_buf buf;
	uint8_t *ctrl;
	uint32_t mask;
	uint32_t consumer;
	uint32_t arm;			/* CTRL_ARM as last stored */
	uint32_t cqn;
	/* QPs by number: what a completion means, and whether its QP still exists. */
	struct vrdma_cq_link **buckets;
	uint32_t bucket_mask;
	uint32_t num_links;
	struct vrdma_qp *last_qp;
	/* Extended polling: the entry that the read_* functions look at. */
	const struct virtio_rdma_cqe *cur;
	struct virtio_rdma_cqe flush;	/* a completion made here because the device is lost */
};

struct vrdma_qp {
	struct verbs_qp vqp;
	struct vrdma_wq sq;
	struct vrdma_wq rq;
	/* In the send CQ, and in the receive CQ if that is another one. */
	struct vrdma_cq_link links[2];
	enum ibv_qp_state state;
	uint32_t max_inline;
	uint32_t sq_elements;		/* of a send, that the device takes: for mirror.h */
	bool sig_all;
	/* Between ibv_wr_start() and ibv_wr_complete(). */
	struct virtio_rdma_sq_wqe *wr_cur;
	uint32_t wr_head;
	int wr_err;
};

struct vrdma_ah {
	struct ibv_ah ah;
	uint32_t ahn;
};

static inline struct vrdma_context *to_vctx(struct ibv_context *context)
{
	return container_of(context, struct vrdma_context, vctx.context);
}

static inline struct vrdma_pd *to_vpd(struct ibv_pd *pd)
{
	return container_of(pd, struct vrdma_pd, pd);
}

static inline struct vrdma_td *to_vtd(struct ibv_td *td)
{
	return container_of(td, struct vrdma_td, td);
}

static inline struct vrdma_cq *to_vcq(struct ibv_cq *cq)
{
	return container_of(cq, struct vrdma_cq, vcq.cq);
}

static inline struct vrdma_cq *ex_to_vcq(struct ibv_cq_ex *cq)
{
	return container_of(cq, struct vrdma_cq, vcq.cq_ex);
}

static inline struct vrdma_qp *to_vqp(struct ibv_qp *qp)
{
	return container_of(qp, struct vrdma_qp, vqp.qp);
}

static inline struct vrdma_qp *ex_to_vqp(struct ibv_qp_ex *qp)
{
	return container_of(qp, struct vrdma_qp, vqp.qp_ex);
}

static inline struct vrdma_srq *to_vsrq(struct ibv_srq *srq)
{
	return container_of(srq, struct vrdma_srq, vsrq.srq);
}

static inline struct vrdma_ah *to_vah(struct ibv_ah *ah)
{
	return container_of(ah, struct vrdma_ah, ah);
}

static inline void *vrdma_wqe(const struct vrdma_wq *wq, uint32_t index)
{
	return (uint8_t *)wq->buf.addr + ((size_t)(index & wq->mask) << wq->log2_stride);
}

/*
 * Section 6.3: ALIVE differs from its value at open once the device is lost; a page of an unplugged
 * device reads as zero.
 */
static inline bool vrdma_lost(const struct vrdma_context *ctx)
{
	const uint32_t *alive = (const uint32_t *)((const uint8_t *)ctx->status +
						   VIRTIO_RDMA_STATUS_ALIVE);

	return unlikely(le32toh(__atomic_load_n(alive, __ATOMIC_ACQUIRE)) != ctx->alive);
}

/* memory.c */
int vrdma_buf_alloc(struct vrdma_context *ctx, struct ibv_pd *pd, enum vrdma_ring ring,
		    struct vrdma_buf *buf, size_t len);
void vrdma_buf_free(struct vrdma_buf *buf);
uint8_t vrdma_log2_stride(size_t bytes, uint8_t min_log2);
size_t vrdma_ctrl_offset(uint32_t entries, uint8_t log2_stride);
int vrdma_wq_layout(struct vrdma_wq *wq, uint32_t max_wr, size_t wqe_size, uint8_t min_log2);
int vrdma_wq_bind_doorbell(struct vrdma_context *ctx, struct vrdma_wq *wq, uint32_t db,
			   uint64_t db_mmap);
void *vrdma_map_db_page(struct vrdma_context *ctx, uint32_t number, uint64_t offset);
bool vrdma_pd_single_threaded(struct ibv_pd *pd);

/* cq.c */
struct ibv_cq *vrdma_create_cq(struct ibv_context *context, int cqe,
			       struct ibv_comp_channel *channel, int vector);
struct vrdma_cq *vrdma_cq_new(struct ibv_context *context, const struct ibv_cq_init_attr_ex *attr);
int vrdma_resize_cq(struct ibv_cq *cq, int cqe);
int vrdma_destroy_cq(struct ibv_cq *cq);
int vrdma_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
int vrdma_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
int vrdma_arm_cq(struct ibv_cq *cq, int solicited_only);
const struct virtio_rdma_cqe *vrdma_cq_next(struct vrdma_cq *cq);
void vrdma_cq_publish(struct vrdma_cq *cq);
void vrdma_cq_discard(struct vrdma_cq *cq, struct vrdma_qp *qp);
void vrdma_cq_link_qp(struct vrdma_cq *cq, struct vrdma_cq_link *link);
void vrdma_cq_unlink_qp(struct vrdma_cq *cq, struct vrdma_cq_link *link);
void vrdma_cq_lock_both(struct vrdma_cq *a, struct vrdma_cq *b);
void vrdma_cq_unlock_both(struct vrdma_cq *a, struct vrdma_cq *b);

/* cq_ex.c */
struct ibv_cq_ex *vrdma_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);

/* qp.c */
struct ibv_qp *vrdma_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
struct ibv_qp *vrdma_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
int vrdma_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
int vrdma_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
		   struct ibv_qp_init_attr *init_attr);
int vrdma_destroy_qp(struct ibv_qp *qp);

/* post.c */
int vrdma_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
int vrdma_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
int vrdma_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
int vrdma_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
int vrdma_sq_room(struct vrdma_qp *qp, uint32_t head);
void vrdma_fill_bind(struct virtio_rdma_sq_wqe *wqe, const struct ibv_mw *mw, uint32_t rkey,
		     const struct ibv_mw_bind_info *info);

/* post_ex.c */
int vrdma_set_wr_ops(struct vrdma_qp *qp, const struct ibv_qp_init_attr_ex *attr, uint64_t caps);

/* srq.c */
struct ibv_srq *vrdma_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr);
struct ibv_srq *vrdma_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr);
int vrdma_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask);
int vrdma_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr);
int vrdma_destroy_srq(struct ibv_srq *srq);
void vrdma_srq_update_tail(struct vrdma_srq *srq);

/* mr.c */
struct ibv_mr *vrdma_reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t hca_va,
			    int access);
struct ibv_mr *vrdma_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
				   int fd, int access);
struct ibv_mr *vrdma_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *ibdm, uint64_t offset,
			       size_t length, unsigned int access);
struct ibv_dm *vrdma_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr);
int vrdma_free_dm(struct ibv_dm *ibdm);
struct ibv_dm *vrdma_import_dm(struct ibv_context *context, uint32_t handle);
void vrdma_unimport_dm(struct ibv_dm *ibdm);
int vrdma_rereg_mr(struct verbs_mr *vmr, int flags, struct ibv_pd *pd, void *addr, size_t length,
		   int access);
int vrdma_dereg_mr(struct verbs_mr *vmr);
struct ibv_mr *vrdma_import_mr(struct ibv_pd *pd, uint32_t handle);
void vrdma_unimport_mr(struct ibv_mr *mr);
struct ibv_mw *vrdma_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int vrdma_dealloc_mw(struct ibv_mw *mw);

/* ah.c */
struct ibv_ah *vrdma_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr);
int vrdma_destroy_ah(struct ibv_ah *ah);

#endif /* VIRTIO_RDMA_H */
