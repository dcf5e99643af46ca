/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR BSD-3-Clause */
/*
 * What the guest kernel driver and the rdma-core provider of the virtio RDMA device tell each
 * other.
 *
 * These structures are the driver's part ("udata") of the uverbs commands: they follow the core's
 * own request and response. Work never passes here: work queues and completion queues are rings
 * in the memory of the process (docs/virtio-rdma.md, sections 6 and 7), laid out as
 * virtio_rdma_abi.h says. User space gives the kernel virtual addresses only; the kernel pins the
 * pages and makes the page lists.
 *
 * Rules for all rings: the buffer begins on a page boundary, its length is what the layout needs
 * (a control block included for CQs and SRQs) rounded up to whole pages or more, `entries` is a
 * power of two, entries of CQs and all control blocks are zero when the command is issued
 * (resize_cq: but for the consumer index and the arm word, which user space has put there;
 * virtio-rdma.md 7.3). Numbers are in host order (the device is little-endian and so are its
 * drivers' hosts); reserved fields are zero.
 */
#ifndef VIRTIO_RDMA_UAPI_H
#define VIRTIO_RDMA_UAPI_H

#include <linux/types.h>

/* ib_device_ops.uverbs_abi_ver: grows when a structure below changes incompatibly. */
#define VIRTIO_RDMA_UVERBS_ABI_VERSION	1

/*
 * ib_device_ops.driver_id, "vrma": private, far from the consecutive numbers of the in-tree
 * drivers.
 */
#define VIRTIO_RDMA_DRIVER_ID		0x76726d61

/*
 * The kick when there is no notify page (virtio_rdma_ucontext_resp.notify_mmap is 0): an ioctl
 * method without attributes on a driver-namespace object. It notifies the kick queue of the
 * calling context. Both ids are 1 << UVERBS_ID_NS_SHIFT.
 */
enum virtio_rdma_objects {
	VIRTIO_RDMA_OBJECT_KICK = 0x1000,
};

enum virtio_rdma_kick_methods {
	VIRTIO_RDMA_METHOD_KICK = 0x1000,
};

/*
 * A process that imports the command fd of another asks for what alloc_ucontext answered:
 * attribute of UVERBS_METHOD_QUERY_CONTEXT with a virtio_rdma_ucontext_resp. Both write the same
 * doorbell pages: no two queues share a word, and the summary bytes only ever get a 1.
 */
enum virtio_rdma_query_context_attrs {
	VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP = 0x1000,
};

/*
 * Device memory: an attribute of UVERBS_METHOD_DM_ALLOC, and a method of UVERBS_OBJECT_DM by which
 * a process that imports it asks for the same.
 */
enum virtio_rdma_dm_alloc_attrs {
	VIRTIO_RDMA_ATTR_DM_ALLOC_RESP = 0x1000,
};

enum virtio_rdma_dm_methods {
	VIRTIO_RDMA_METHOD_DM_QUERY = 0x1000,
};

enum virtio_rdma_dm_query_attrs {
	VIRTIO_RDMA_ATTR_DM_QUERY_HANDLE = 0x1000,
	VIRTIO_RDMA_ATTR_DM_QUERY_RESP,
};

struct virtio_rdma_dm_resp {
	__aligned_u64 mmap;		/* offset for mmap() on the command fd */
	__aligned_u64 length;		/* of all of the mapping, whole pages */
};					/* 16 */

/* alloc_ucontext */
struct virtio_rdma_ucontext_req {
	__u32 comp_mask;		/* 0 */
	__u32 reserved;
};					/* 8 */

/*
 * `*_mmap` are offsets for mmap() on the command fd, PAGE_SIZE long each, MAP_SHARED. The status
 * page can be mapped read-only only. The notify page can be mapped write-only or read-write. None
 * survives fork().
 */
struct virtio_rdma_ucontext_resp {
	__aligned_u64 status_mmap;	/* the NIC's status page: NEED_KICK, ALIVE */
	__aligned_u64 db_mmap;		/* doorbell page 0 of this context */
	__aligned_u64 notify_mmap;	/* page that holds the kick address, or 0: use the ioctl */
	__aligned_u64 caps;		/* VIRTIO_RDMA_CAP_* of the device */
	__u32 notify_offset;		/* where in it `kick_queue` is stored, as a __le16 */
	__u32 kick_queue;		/* virtqueue index of this context's kick queue */
	__u32 alive;			/* the value of ALIVE while the device lives */
	__u32 max_inline;
	__u32 max_send_sge;
	__u32 max_recv_sge;
	__u32 max_srq_sge;
	__u32 max_qp_wr;
	__u32 max_srq_wr;
	__u32 max_cqe;
	__u32 reserved[2];
};					/* 80 */

/* alloc_pd */
struct virtio_rdma_pd_resp {
	__u32 pdn;
	__u32 reserved;
};					/* 8 */

/* create_cq and resize_cq. The number of CQEs that the core reports is `entries`. */
struct virtio_rdma_cq_req {
	__aligned_u64 buf;
	__u32 buf_len;
	__u32 entries;
};					/* 16 */
struct virtio_rdma_cq_resp {
	__u32 cqn;
	__u32 reserved;
};					/* 8; none for resize_cq */

/* create_srq; modify_srq with IBV_SRQ_MAX_WR (same stride as before, log2_stride repeated) */
struct virtio_rdma_srq_req {
	__aligned_u64 buf;
	__u32 buf_len;
	__u32 entries;
	__u8 log2_stride;
	__u8 reserved[7];
};					/* 24 */
struct virtio_rdma_srq_resp {
	__u32 srqn;
	__u32 db;			/* doorbell number: page << 16 | slot */
	__aligned_u64 db_mmap;		/* the page of `db` */
};					/* 16; none for modify_srq */

/*
 * create_qp. A queue that is not wanted (no requests asked for, or the receive queue of a QP with
 * an SRQ) has buf, len, entries 0. The capabilities that the application asked for travel in the
 * core's own request: max_*_wr <= entries.
 */
struct virtio_rdma_qp_req {
	__aligned_u64 sq_buf;
	__aligned_u64 rq_buf;
	__u32 sq_len;
	__u32 rq_len;
	__u32 sq_entries;
	__u32 rq_entries;
	__u8 sq_log2_stride;
	__u8 rq_log2_stride;
	__u8 reserved[6];
};					/* 40 */
struct virtio_rdma_qp_resp {
	__u32 qpn;
	__u32 sq_db;			/* VIRTIO_RDMA_DB_NONE where there is no queue */
	__u32 rq_db;
	__u32 reserved;
	__aligned_u64 sq_db_mmap;	/* the pages of the doorbells: map each page number once */
	__aligned_u64 rq_db_mmap;
};					/* 32 */

/* create_ah */
struct virtio_rdma_ah_resp {
	__u32 ahn;			/* sq_wqe.arg0 */
	__u32 reserved;
};					/* 8 */

#endif /* VIRTIO_RDMA_UAPI_H */
