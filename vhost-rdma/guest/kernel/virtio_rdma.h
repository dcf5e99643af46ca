/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The virtio RDMA driver: what its files share.
 *
 * Two lives are kept apart. `struct vrdma` is the virtio device: its queues, its contexts, its
 * loss. `struct vrdma_ibdev` is the RDMA device that the verbs core sees; it exists only while
 * the network interface with our MAC address exists (docs/virtio-rdma.md, section 10).
 *
 * Whoever gives memory to the device holds a `struct vrdma_mem` for it. When the device may still
 * touch the memory although its object is gone for us (a command that timed out, section 5.6) the
 * memory goes to the orphans and is freed after the next confirmed reset, not before.
 */
#ifndef VIRTIO_RDMA_H
#define VIRTIO_RDMA_H

#include "compat.h"
#include <linux/completion.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/refcount.h>
#include <linux/semaphore.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>
#include <rdma/uverbs_ioctl.h>

#include "virtio_rdma_abi.h"
#include "virtio_rdma_uapi.h"

struct vrdma;
struct vrdma_ctx;

/* ---- Memory given to the device ---- */
struct vrdma_mem {
	struct list_head orphan;
	struct ib_umem *umem;		/* pages of a process; else the rest is used */
	void *vaddr;			/* pages of ours: vzalloc(), */
	struct page *page;		/* one page, or pages in one run, */
	size_t coherent;		/* or dma_alloc_coherent() of so many bytes */
	dma_addr_t *dma;		/* of each page */
	dma_addr_t one;			/* `dma` of a single page */
	u32 npages;
	u32 first;			/* of `page` */
	u32 offset;			/* into that one */
};

struct vrdma_page_list {
	struct virtio_rdma_page_list desc;
	struct vrdma_mem *mem;		/* the list pages: leaves first, the root last */
	u32 filled;
};

struct vrdma_mem *vrdma_mem_umem(struct ib_umem *umem);
struct vrdma_mem *vrdma_mem_user(struct ib_device *ib, u64 addr, u64 length, int access);
struct vrdma_mem *vrdma_mem_kernel(struct vrdma *vr, size_t length);
struct vrdma_mem *vrdma_mem_page(struct vrdma *vr);
struct vrdma_mem *vrdma_mem_part(struct vrdma *vr, struct page *page, u64 offset, u64 length);
struct vrdma_mem *vrdma_mem_contiguous(struct vrdma *vr, size_t length);
void vrdma_mem_put(struct vrdma *vr, struct vrdma_mem *mem, bool device_is_done);
void vrdma_free_orphans(struct vrdma *vr);
int vrdma_page_list_build(struct vrdma *vr, struct vrdma_page_list *list, struct vrdma_mem *mem);
void vrdma_page_list_free(struct vrdma *vr, struct vrdma_page_list *list);
struct vrdma_mem *vrdma_mem_user_ring(struct ib_device *ib, u64 addr, u32 given, u64 needed);

static inline u64 vrdma_ring_bytes(u32 entries, u8 log2_stride, bool ctrl)
{
	u64 len = (u64)entries << log2_stride;

	return ctrl ? ALIGN(len, VIRTIO_RDMA_RING_CTRL_ALIGN) + VIRTIO_RDMA_CTRL_SIZE : len;
}

/* ---- Control queue (cmd.c) ---- */
struct vrdma_cmdq {
	struct virtqueue *vq;
	spinlock_t lock;		/* the virtqueue and all that follows */
	struct semaphore slots;		/* commands of sleeping callers in flight */
	struct list_head pending;	/* in the ring */
	struct list_head backlog;	/* started, and waiting for room in the ring */
	struct delayed_work watch;
	u64 answered;
	u64 watched;			/* `answered` at the last look of `watch` */
};

struct vrdma_cmd_buf;
/* How a command that was started ends: 0 and the number in its answer, or an error. */
typedef void vrdma_cmd_done(struct vrdma *vr, void *arg, int ret, u32 object);

#define VRDMA_CMD_TIMEOUT_MS	5000u

void vrdma_cmdq_init(struct vrdma *vr, struct virtqueue *vq);
void vrdma_cmdq_drop(struct vrdma *vr);
void vrdma_cmdq_callback(struct virtqueue *vq);
void vrdma_cmdq_fail_all(struct vrdma *vr);
int vrdma_cmd(struct vrdma *vr, u16 opcode, u32 ctx, const void *req, size_t req_len, void *resp,
	      size_t resp_len);
bool vrdma_cmd_destroy(struct vrdma *vr, u16 opcode, u32 ctx, u32 object);
bool vrdma_cmd_destroy_context(struct vrdma *vr, u32 ctx);
int vrdma_cmd_dereg(struct vrdma *vr, u32 ctx, u32 lkey, bool *device_is_done);
bool vrdma_cmd_ask(struct vrdma *vr);
struct vrdma_cmd_buf *vrdma_cmd_alloc(u16 opcode, u32 ctx, const void *req, size_t req_len,
				      size_t resp_len, gfp_t gfp);
void *vrdma_cmd_request(struct vrdma_cmd_buf *buf);
void vrdma_cmd_free(struct vrdma_cmd_buf *buf);
void vrdma_cmd_start(struct vrdma *vr, struct vrdma_cmd_buf *buf, vrdma_cmd_done *call, void *arg);

/* ---- Event queues (event.c) ---- */
struct vrdma_eq {
	struct vrdma *vr;
	struct virtqueue *vq;
	spinlock_t lock;		/* the virtqueue */
	struct work_struct work;	/* serves a device that does not stop */
	void *buffers;
	u32 size;			/* of one buffer */
};

/*
 * An object that events name: they hold a reference while a handler runs, destruction waits for it.
 */
struct vrdma_ref {
	refcount_t count;
	struct completion gone;
};

void vrdma_ref_init(struct vrdma_ref *ref);
void vrdma_ref_put(struct vrdma_ref *ref);
void vrdma_ref_wait(struct vrdma_ref *ref);
int vrdma_eq_init(struct vrdma *vr, struct vrdma_eq *eq, struct virtqueue *vq, u32 size);
int vrdma_eq_stock(struct vrdma_eq *eq);
void vrdma_eq_free(struct vrdma_eq *eq);
void vrdma_event_callback(struct virtqueue *vq);
void vrdma_comp_callback(struct virtqueue *vq);
void vrdma_wake_all_cqs(struct vrdma *vr);

/* ---- Contexts and doorbells (context.c, doorbell.c) ---- */
enum vrdma_mmap_kind { VRDMA_MMAP_STATUS, VRDMA_MMAP_DOORBELL, VRDMA_MMAP_NOTIFY,
		       VRDMA_MMAP_DM };

struct vrdma_mmap {
	struct rdma_user_mmap_entry entry;
	enum vrdma_mmap_kind kind;
	struct page *page;		/* reference held to all of it; NULL for notify */
	unsigned long pfn;
};

struct vrdma_db_page {
	struct vrdma_mem *mem;
	struct vrdma_mmap *mmap;	/* NULL in the kernel's context */
};

struct vrdma_ctx {
	struct vrdma *vr;
	u32 id;
	u32 kick_queue;
	struct mutex lock;		/* pages, slots_used */
	struct vrdma_db_page *pages;
	u32 npages;
	u32 slots_used;
};

struct vrdma_ucontext {
	struct ib_ucontext ibucontext;
	struct vrdma_ctx ctx;
	struct vrdma_mmap *status;
	struct vrdma_mmap *notify;
};

int vrdma_alloc_ucontext(struct ib_ucontext *ibuc, struct ib_udata *udata);
void vrdma_dealloc_ucontext(struct ib_ucontext *ibuc);
int vrdma_query_ucontext(struct ib_ucontext *ibuc, struct uverbs_attr_bundle *attrs);
void vrdma_disassociate_ucontext(struct ib_ucontext *ibuc);
int vrdma_mmap_op(struct ib_ucontext *ibuc, struct vm_area_struct *vma);
void vrdma_mmap_free(struct rdma_user_mmap_entry *entry);
struct vrdma_mmap *vrdma_mmap_insert(struct ib_ucontext *ibuc, enum vrdma_mmap_kind kind,
				     struct page *page, unsigned long pfn);
extern const struct uapi_definition vrdma_uapi_defs[];
extern const struct uapi_definition vrdma_dm_defs[];

void vrdma_ctx_init(struct vrdma *vr, struct vrdma_ctx *ctx);
void vrdma_ctx_drop_pages(struct vrdma_ctx *ctx, bool device_is_done);
int vrdma_ctx_append_page(struct vrdma_ctx *ctx, struct vrdma_mem *mem,
			  struct vrdma_mmap *mmap);
int vrdma_ctx_reserve_slots(struct vrdma_ctx *ctx, struct ib_ucontext *ibuc, u32 count);
void vrdma_ctx_release_slots(struct vrdma_ctx *ctx, u32 count);
u64 vrdma_db_mmap_offset(struct vrdma_ctx *ctx, u32 db);
__le32 *vrdma_db_index(struct vrdma_ctx *ctx, u32 db);
void vrdma_doorbell(struct vrdma *vr, u32 queue, __le32 *index, u32 producer);
void vrdma_kick(struct vrdma *vr, u32 queue);
void vrdma_find_notify(struct vrdma *vr);

/* ---- The device ---- */
struct vrdma_ibdev {
	struct ib_device ib;
	struct vrdma *vr;
};

struct vrdma {
	struct virtio_device *vdev;
	struct device *dma_dev;
	u8 mac[6];
	u32 num_comp;
	u32 num_kick;
	struct virtqueue **vqs;
	u32 num_vqs;

	struct vrdma_cmdq cmdq;
	struct vrdma_eq event_eq;
	struct vrdma_eq *comp_eqs;

	struct vrdma_mem *status_page;
	u64 nonce;
	bool up;			/* started; written under ib_lock */
	bool lost;
	bool silent;			/* lost, because a command was not answered */
	struct work_struct lost_work;

	spinlock_t restart_lock;	/* what follows, but for the work item */
	bool may_restart;
	u32 restarts;			/* without a calm life between them */
	u32 refusals;			/* of them in a row, and the last */
	unsigned long restarted;	/* when, in jiffies */
	unsigned long lost_at;		/* likewise */
	struct delayed_work restart;

	struct virtio_rdma_query_device_resp attr;
	u64 caps;

	atomic_t dm_pages;		/* that programs have */

	struct xarray qps;
	struct xarray cqs;
	struct xarray srqs;

	struct vrdma_ctx kctx;
	spinlock_t orphan_lock;		/* `orphans` */
	struct list_head orphans;

	spinlock_t ah_lock;		/* a handle's number, status and doom */
	wait_queue_head_t ah_wait;
	spinlock_t held_lock;		/* inside a queue's lock */
	struct list_head held;		/* QPs with requests that wait for a handle's number */

	atomic_t users;			/* contexts of processes, and QPs */
	struct delayed_work keepalive;

	/* Where a store notifies a queue, one page per queue; 0: not mappable. */
	u64 *notify_phys;

	struct notifier_block netdev_nb;
	bool netdev_watched;
	struct work_struct pair_work;
	spinlock_t pair_lock;		/* netdev, netdev_gone */
	struct net_device *netdev;	/* reference held */
	bool netdev_gone;
	struct mutex ib_lock;		/* ib, live */
	struct vrdma_ibdev *ib;
	struct vrdma_ibdev __rcu *live;	/* `ib` while it is registered, for events */

	struct work_struct port_work;	/* the interface went up or down */
	struct mutex gid_lock;		/* what follows, and GID_SET */
	struct list_head gids;
	bool port_active;		/* the device has `gids` */
};

/* main.c */
int vrdma_up(struct vrdma *vr);
void vrdma_stop(struct vrdma *vr);

/* loss.c */
void vrdma_loss_init(struct vrdma *vr);
void vrdma_set_alive(struct vrdma *vr, u32 value);
void vrdma_lost(struct vrdma *vr, const char *why);
void vrdma_failed(struct vrdma *vr, const char *why);
void vrdma_heard(struct vrdma *vr);
void vrdma_restart_allow(struct vrdma *vr);
void vrdma_restart_forbid(struct vrdma *vr);
void vrdma_keepalive_while_used(struct vrdma *vr);
void vrdma_unused(struct vrdma *vr);
static inline bool vrdma_is_lost(const struct vrdma *vr)
{
	return READ_ONCE(vr->lost);
}

static inline void *vrdma_status(const struct vrdma *vr)
{
	return page_address(vr->status_page->page);
}

static inline struct vrdma *to_vr(struct ib_device *ib)
{
	return container_of(ib, struct vrdma_ibdev, ib)->vr;
}

static inline u32 vrdma_attr32(__le32 v)
{
	/* The core keeps limits as int. */
	return min_t(u32, le32_to_cpu(v), INT_MAX);
}

/* ---- Objects ---- */
struct vrdma_pd {
	struct ib_pd ibpd;
	struct vrdma_ctx *ctx;
	u32 pdn;
	atomic_t unsettled_ahs;		/* commands for handles of it that are not answered */
};

struct vrdma_mr {
	struct ib_mr ibmr;
	struct vrdma_ctx *ctx;
	struct vrdma_mem *mem;
	u64 start;
	int access;
	bool foreign;			/* no memory of the process: can not be registered anew */
	/* Fast-register: `mem` is the array of pages. */
	u32 max_pages;
	u32 page_count;
};

/* Device memory (dm.c): what each device has of it. */
#define VRDMA_DM_SIZE	SZ_1M

struct vrdma_dm {
	struct ib_dm ibdm;
	struct page *page;
	struct vrdma_mmap *mmap;
};

struct vrdma_mw {
	struct ib_mw ibmw;
	struct vrdma_ctx *ctx;
};

/* A handle of the kernel at the device (ah.c). */
struct vrdma_ah_handle {
	refcount_t ref;
	struct vrdma_pd *pd;
	struct vrdma_cmd_buf *destroy;	/* the command that ends it */
	int status;			/* -EINPROGRESS, 0 (`ahn` is there) or an error */
	u32 ahn;
	bool doomed;			/* to be destroyed when it is there */
};

struct vrdma_ah {
	struct ib_ah ibah;
	struct vrdma_ctx *ctx;
	struct virtio_rdma_av av;
	struct vrdma_ah_handle *handle;	/* of the kernel, else */
	u32 ahn;			/* of a process */
};

struct vrdma_cq {
	struct ib_cq ibcq;
	struct vrdma_ctx *ctx;
	struct vrdma_ref ref;
	struct vrdma_mem *mem;
	u32 cqn;
	u32 entries;
	/* Kernel rings only. */
	spinlock_t lock;		/* all that follows */
	u8 *ring;
	u8 *ctrl;
	u32 consumer;
	struct list_head send_qps;
	struct list_head recv_qps;
};

/* A word of a ring's control block, written by the device. */
static inline u32 vrdma_ctrl_load(u8 *ctrl, u32 offset)
{
	/* What the device did before it stored the word is seen after it. */
	return le32_to_cpu(virt_load_acquire((__le32 *)(ctrl + offset)));
}

static inline void vrdma_ctrl_store(u8 *ctrl, u32 offset, u32 value)
{
	/* What we read before is read before the device may overwrite it. */
	virt_store_release((__le32 *)(ctrl + offset), cpu_to_le32(value));
}

/* What a work queue of the kernel is to hold. */
struct vrdma_wq_shape {
	u32 max_wr;
	u32 max_sge;
	u32 bytes;			/* of the greatest request */
	u8 min_log2_stride;
	bool ctrl;			/* with a control block */
	bool handles;			/* requests name address handles */
};

/* The kernel's side of a work queue. */
struct vrdma_wq {
	spinlock_t lock;		/* head, rung, tail and the slots between */
	struct vrdma_mem *mem;
	u8 *ring;
	u64 *wr_ids;			/* for the flush after a loss of the device */
	struct vrdma_ah_handle **handles; /* per slot, without a number yet; UD and GSI only */
	u32 entries;			/* 0: no such queue */
	u32 max_wr;
	u16 max_sge;
	u8 log2_stride;
	u32 head;
	u32 rung;			/* the device was told; only handles hold it back */
	u32 tail;
	u32 db;
	__le32 *db_index;
};

struct vrdma_srq {
	struct ib_srq ibsrq;
	struct vrdma_ctx *ctx;
	struct vrdma_ref ref;
	u32 srqn;
	u32 limit;
	struct vrdma_wq rq;
	u8 *ctrl;
	bool user;
};

struct vrdma_qp {
	struct ib_qp ibqp;
	struct vrdma_ctx *ctx;
	struct vrdma_ref ref;
	u32 qpn;
	enum ib_qp_state state;
	struct ib_qp_cap cap;
	enum ib_sig_type sig_type;
	bool user;
	struct vrdma_wq sq;
	struct vrdma_wq rq;
	struct list_head on_send_cq;
	struct list_head on_recv_cq;
	struct list_head on_held;
};

#define VRDMA_TO(name, type, member)					\
	static inline struct type *to_##name(struct ib_##member *p)	\
	{								\
		return container_of(p, struct type, ib##member);	\
	}
VRDMA_TO(vpd, vrdma_pd, pd)
VRDMA_TO(vmr, vrdma_mr, mr)
VRDMA_TO(vmw, vrdma_mw, mw)
VRDMA_TO(vdm, vrdma_dm, dm)
VRDMA_TO(vah, vrdma_ah, ah)
VRDMA_TO(vcq, vrdma_cq, cq)
VRDMA_TO(vsrq, vrdma_srq, srq)
VRDMA_TO(vqp, vrdma_qp, qp)
VRDMA_TO(vuc, vrdma_ucontext, ucontext)

/* Its sends name address handles. */
static inline bool vrdma_is_datagram(const struct vrdma_qp *qp)
{
	return qp->ibqp.qp_type == IB_QPT_UD || qp->ibqp.qp_type == IB_QPT_GSI;
}

static inline struct vrdma_ctx *vrdma_ctx_of(struct vrdma *vr, struct ib_udata *udata)
{
	struct vrdma_ucontext *uc;

	uc = rdma_udata_to_drv_context(udata, struct vrdma_ucontext, ibucontext);
	return uc ? &uc->ctx : &vr->kctx;
}

/* pd.c */
int vrdma_alloc_pd(struct ib_pd *ibpd, struct ib_udata *udata);
int vrdma_dealloc_pd(struct ib_pd *ibpd, struct ib_udata *udata);

/* mr.c */
struct ib_mr *vrdma_get_dma_mr(struct ib_pd *ibpd, int access);
struct ib_mr *vrdma_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length, u64 iova, int access,
				VRDMA_DMAH_ARG struct ib_udata *udata);
struct ib_mr *vrdma_reg_user_mr_dmabuf(struct ib_pd *ibpd, u64 offset, u64 length, u64 iova,
				       int fd, int access, VRDMA_DMAH_ARG
				       VRDMA_DMABUF_ARG);
struct ib_mr *vrdma_rereg_user_mr(struct ib_mr *ibmr, int flags, u64 start, u64 length, u64 iova,
				  int access, struct ib_pd *new_pd, struct ib_udata *udata);
int vrdma_dereg_mr(struct ib_mr *ibmr, struct ib_udata *udata);
struct ib_mr *vrdma_alloc_mr(struct ib_pd *ibpd, enum ib_mr_type type, u32 max_num_sg);
int vrdma_map_mr_sg(struct ib_mr *ibmr, struct scatterlist *sg, int nents, unsigned int *offset);
int vrdma_alloc_mw(struct ib_mw *ibmw, struct ib_udata *udata);
int vrdma_dealloc_mw(struct ib_mw *ibmw);
struct ib_mr *vrdma_reg_dm_mr(struct ib_pd *ibpd, struct ib_dm *ibdm, struct ib_dm_mr_attr *attr,
			      struct uverbs_attr_bundle *attrs);

/* dm.c */
struct ib_dm *vrdma_alloc_dm(struct ib_device *ib, struct ib_ucontext *ibuc,
			     struct ib_dm_alloc_attr *attr, struct uverbs_attr_bundle *attrs);
int vrdma_dealloc_dm(struct ib_dm *ibdm, struct uverbs_attr_bundle *attrs);

/* cq.c */
int vrdma_create_cq(struct ib_cq *ibcq, const struct ib_cq_init_attr *attr,
		    VRDMA_CREATE_CQ_ARG);
int vrdma_destroy_cq(struct ib_cq *ibcq, struct ib_udata *udata);
int vrdma_resize_cq(struct ib_cq *ibcq, VRDMA_RESIZE_CQE cqe, struct ib_udata *udata);
int vrdma_modify_cq(struct ib_cq *ibcq, u16 count, u16 period);

/* srq.c */
int vrdma_create_srq(struct ib_srq *ibsrq, struct ib_srq_init_attr *init, struct ib_udata *udata);
int vrdma_modify_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr, enum ib_srq_attr_mask mask,
		     struct ib_udata *udata);
int vrdma_query_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr);
int vrdma_destroy_srq(struct ib_srq *ibsrq, struct ib_udata *udata);

/* qp.c, qp_attr.c */
int vrdma_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *init, struct ib_udata *udata);
int vrdma_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata);
int vrdma_modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask, struct ib_udata *udata);
int vrdma_query_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
		   struct ib_qp_init_attr *init);
int vrdma_attach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid);
int vrdma_detach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid);

/* ah.c */
int vrdma_av_from_attr(struct virtio_rdma_av *av, const struct rdma_ah_attr *attr);
void vrdma_av_to_attr(struct ib_device *ib, struct rdma_ah_attr *attr,
		      const struct virtio_rdma_av *av);
int vrdma_create_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *init, struct ib_udata *udata);
int vrdma_query_ah(struct ib_ah *ibah, struct rdma_ah_attr *attr);
int vrdma_destroy_ah(struct ib_ah *ibah, u32 flags);
void vrdma_ah_handle_put(struct vrdma_ah_handle *handle);
void vrdma_ah_wait_idle(struct vrdma *vr, struct vrdma_pd *pd);

/* ring.c, poll.c: the data path of kernel consumers */
int vrdma_post_send(struct ib_qp *ibqp, const struct ib_send_wr *wr, const struct ib_send_wr **bad);
int vrdma_post_recv(struct ib_qp *ibqp, const struct ib_recv_wr *wr, const struct ib_recv_wr **bad);
int vrdma_post_srq_recv(struct ib_srq *ibsrq, const struct ib_recv_wr *wr,
			const struct ib_recv_wr **bad);
int vrdma_wq_init(struct vrdma *vr, struct vrdma_wq *wq, const struct vrdma_wq_shape *shape);
void vrdma_wq_free(struct vrdma *vr, struct vrdma_wq *wq, bool device_is_done);
void vrdma_qp_reset_rings(struct vrdma_qp *qp);
void vrdma_qp_discard(struct vrdma_qp *qp);
int vrdma_poll_cq(struct ib_cq *ibcq, int num, struct ib_wc *wc);
int vrdma_req_notify_cq(struct ib_cq *ibcq, enum ib_cq_notify_flags flags);

/* held.c: their doorbells, and requests that wait for the number of an address handle */
#define VRDMA_NO_AH	((u64)U32_MAX)
void vrdma_sq_ring(struct vrdma_qp *qp);
void vrdma_sq_drop_held(struct vrdma_qp *qp);
void vrdma_ring_held(struct vrdma *vr);

/* port.c */
int vrdma_query_device(struct ib_device *ib, struct ib_device_attr *attr, struct ib_udata *udata);
int vrdma_query_port(struct ib_device *ib, u32 port, struct ib_port_attr *attr);
int vrdma_query_pkey(struct ib_device *ib, u32 port, u16 index, u16 *pkey);
int vrdma_port_immutable(struct ib_device *ib, u32 port, struct ib_port_immutable *imm);
enum rdma_link_layer vrdma_link_layer(struct ib_device *ib, u32 port);
void vrdma_fw_str(struct ib_device *ib, char *str);
struct rdma_hw_stats *vrdma_alloc_device_stats(struct ib_device *ib);
struct rdma_hw_stats *vrdma_alloc_port_stats(struct ib_device *ib, u32 port);
int vrdma_get_hw_stats(struct ib_device *ib, struct rdma_hw_stats *stats, u32 port, int index);

/* gid.c */
int vrdma_add_gid(const struct ib_gid_attr *attr, void **context);
int vrdma_del_gid(const struct ib_gid_attr *attr, void **context);
bool vrdma_port_is_up(struct vrdma *vr);
void vrdma_port_begin(struct vrdma *vr);
void vrdma_port_changed(struct work_struct *work);

/* ibdev.c */
int vrdma_ib_register(struct vrdma *vr, struct net_device *netdev);
void vrdma_ib_unregister(struct vrdma *vr);
void vrdma_ib_dealloc(struct vrdma *vr);
void vrdma_ib_event(struct vrdma *vr, enum ib_event_type type);

/* netdev.c */
int vrdma_netdev_watch(struct vrdma *vr);
void vrdma_netdev_unwatch(struct vrdma *vr);
void vrdma_netdev_pair(struct vrdma *vr);

#endif /* VIRTIO_RDMA_H */
