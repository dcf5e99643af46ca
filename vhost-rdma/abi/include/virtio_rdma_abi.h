/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The virtio RDMA device ABI, version 1, as docs/virtio-rdma.md specifies it.
 *
 * Every number here stands once more in the Rust crate `virtio-rdma-abi` and in the tables of the
 * document; a test compares the three. All fields are little-endian and naturally aligned; reserved
 * fields are written as zero and ignored when read. Values that name verbs concepts (access flags,
 * QP states, attribute masks, opcodes, completion statuses, events) are those of the InfiniBand
 * verbs interface (include/uapi/rdma/ib_user_verbs.h), so that neither side has to translate.
 *
 * The includer provides __u8, __le16, __le32 and __le64 (<linux/types.h> does).
 */
#ifndef VIRTIO_RDMA_ABI_H
#define VIRTIO_RDMA_ABI_H

/* ---- Identity -------------------------------------------------------------------------------- */
#define VIRTIO_RDMA_DEVICE_ID			42
#define VIRTIO_RDMA_LAB_DEVICE_ID		21	/* for VMMs that refuse 42; magic decides */
#define VIRTIO_RDMA_MAGIC			0x414d4452u	/* "RDMA" */
#define VIRTIO_RDMA_ABI_VERSION			1u
#define VIRTIO_RDMA_PAGE_SIZE			4096u

/* ---- Virtqueues ------------------------------------------------------------------------------ */
#define VIRTIO_RDMA_VQ_CONTROL			0u
#define VIRTIO_RDMA_VQ_EVENT			1u
#define VIRTIO_RDMA_VQ_COMP_BASE		2u	/* + vector; kick queues follow */

/* Configuration space: read once, in probe. */
struct virtio_rdma_config {
	__le32 magic;
	__le32 abi_version;
	__le16 num_comp_vectors;
	__le16 num_kick_queues;
	__u8 mac[6];
	__u8 reserved[46];
};						/* 64 bytes */

/* ---- Page lists ------------------------------------------------------------------------------ */
#define VIRTIO_RDMA_LIST_PAGE_ENTRIES		512u
#define VIRTIO_RDMA_MAX_LIST_LEVELS		4u

struct virtio_rdma_page_list {
	__le64 addr;		/* levels 0: the first byte's page; else the root list page */
	__le32 npages;		/* data pages of 1 << page_shift bytes */
	__le32 offset;		/* of the first byte in the first page */
	__u8 page_shift;	/* 12..30 */
	__u8 levels;		/* 0..4 levels of list pages */
	__u8 reserved[6];
};						/* 24 bytes */

/* ---- Status page (one per NIC, kernel-owned) and doorbell pages (per context) ---------------- */
#define VIRTIO_RDMA_STATUS_NEED_KICK		0u	/* le32, device writes */
#define VIRTIO_RDMA_STATUS_ALIVE		64u	/* le32, driver writes */

#define VIRTIO_RDMA_DB_SUMMARY			0u	/* one byte per group */
#define VIRTIO_RDMA_DB_INDEX			256u	/* le32 producer index per slot */
#define VIRTIO_RDMA_DB_GROUP_SLOTS		64u
#define VIRTIO_RDMA_DB_GROUPS			15u
#define VIRTIO_RDMA_DB_SLOTS			960u	/* per page */
/* A doorbell number is page << 16 | slot. */
#define VIRTIO_RDMA_DB_PAGE_SHIFT		16u
#define VIRTIO_RDMA_DB_NONE			0xffffffffu

/* ---- Ring control blocks (CQ, SRQ): at align_up(entries << log2_stride, 128) in the ring ----- */
#define VIRTIO_RDMA_RING_CTRL_ALIGN		128u
#define VIRTIO_RDMA_CTRL_CONSUMER		0u	/* CQ: le32, driver's */
#define VIRTIO_RDMA_CTRL_ARM			4u	/* CQ: le32, driver's: seq << 2 | what */
#define VIRTIO_RDMA_CTRL_FIRED			64u	/* CQ: le32, device's: last that fired */
#define VIRTIO_RDMA_CTRL_TAKEN			68u	/* SRQ: le32, device's: consumer index */
#define VIRTIO_RDMA_CTRL_SIZE			128u

#define VIRTIO_RDMA_ARM_SOLICITED		1u
#define VIRTIO_RDMA_ARM_ANY			2u
#define VIRTIO_RDMA_ARM_WHAT_MASK		3u
#define VIRTIO_RDMA_ARM_SEQ_SHIFT		2u

/* ---- Work requests --------------------------------------------------------------------------- */
struct virtio_rdma_sge {
	__le64 addr;
	__le32 length;
	__le32 lkey;
};						/* 16 bytes */

#define VIRTIO_RDMA_WR_RDMA_WRITE		0u
#define VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM	1u
#define VIRTIO_RDMA_WR_SEND			2u
#define VIRTIO_RDMA_WR_SEND_WITH_IMM		3u
#define VIRTIO_RDMA_WR_RDMA_READ		4u
#define VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP	5u
#define VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD	6u
#define VIRTIO_RDMA_WR_LOCAL_INV		7u
#define VIRTIO_RDMA_WR_BIND_MW			8u
#define VIRTIO_RDMA_WR_SEND_WITH_INV		9u
#define VIRTIO_RDMA_WR_FLUSH			14u
#define VIRTIO_RDMA_WR_ATOMIC_WRITE		15u
#define VIRTIO_RDMA_WR_REG_MR			0x20u

#define VIRTIO_RDMA_FLUSH_GLOBAL		0x001u	/* sq_wqe.aux of FLUSH */
#define VIRTIO_RDMA_FLUSH_PERSISTENT		0x002u
#define VIRTIO_RDMA_FLUSH_MR			0x100u

#define VIRTIO_RDMA_SEND_FENCE			0x01u
#define VIRTIO_RDMA_SEND_SIGNALED		0x02u
#define VIRTIO_RDMA_SEND_SOLICITED		0x04u
#define VIRTIO_RDMA_SEND_INLINE			0x08u

#define VIRTIO_RDMA_SQ_WQE_MIN_LOG2_STRIDE	6u
#define VIRTIO_RDMA_RQ_WQE_MIN_LOG2_STRIDE	5u
#define VIRTIO_RDMA_WQE_MAX_LOG2_STRIDE		12u
#define VIRTIO_RDMA_SQ_WQE_DATA			48u	/* SGEs or inline bytes start here */
#define VIRTIO_RDMA_RQ_WQE_DATA			16u

struct virtio_rdma_sq_wqe {
	__le64 wr_id;
	__u8 opcode;
	__u8 flags;
	__le16 num_sge;		/* with SEND_INLINE: the number of inline bytes */
	__le32 imm;		/* immediate (opaque bytes); SEND_WITH_INV and LOCAL_INV: key;
				 * BIND_MW: the window's present rkey; REG_MR: access flags */
	__le64 remote_addr;	/* RDMA and atomics; BIND_MW: first address; REG_MR: iova */
	__le32 rkey;		/* RDMA and atomics; UD: remote QPN; BIND_MW, REG_MR: the new key */
	__le32 aux;		/* UD: remote Q_Key; BIND_MW: access flags; REG_MR: page count */
	__le64 arg0;		/* atomics: compare or add; UD: AH number;
				 * BIND_MW, REG_MR: length */
	__le64 arg1;		/* atomics: swap; BIND_MW: lkey of the region; REG_MR: address of
				 * an array of le64 page addresses | page_shift << 56 */
};						/* 48 bytes, then SGEs or inline bytes */

struct virtio_rdma_rq_wqe {
	__le64 wr_id;
	__le16 num_sge;
	__u8 reserved[6];
};						/* 16 bytes, then SGEs */

/* ---- Completions ----------------------------------------------------------------------------- */
#define VIRTIO_RDMA_CQE_LOG2_STRIDE		6u

struct virtio_rdma_cqe {
	__le64 wr_id;
	__le32 qpn;
	__u8 opcode;		/* VIRTIO_RDMA_WC_* */
	__u8 status;		/* VIRTIO_RDMA_WC_STATUS_* */
	__le16 flags;		/* VIRTIO_RDMA_CQE_* */
	__le32 byte_len;
	__le32 imm;		/* immediate, or the key that was invalidated */
	__le32 src_qp;
	__le32 wqe_index;	/* free-running index of the work request that completed */
	__le32 vendor_err;
	__le16 pkey_index;
	__u8 sl;
	__u8 reserved0;
	__le64 timestamp;	/* nanoseconds of the device's clock */
	__u8 smac[6];
	__u8 reserved1[2];
	__le32 reserved2;
	__le32 seq;		/* free-running index of this entry + 1; written last */
};						/* 64 bytes */

#define VIRTIO_RDMA_CQE_RECV			0x0001u	/* of a receive queue or an SRQ */
#define VIRTIO_RDMA_CQE_SRQ			0x0002u
#define VIRTIO_RDMA_CQE_GRH			0x0004u
#define VIRTIO_RDMA_CQE_IMM			0x0008u
#define VIRTIO_RDMA_CQE_INV			0x0010u
#define VIRTIO_RDMA_CQE_SMAC			0x0020u
#define VIRTIO_RDMA_CQE_IPV4			0x0040u	/* network header type; else IPv6 */
#define VIRTIO_RDMA_CQE_SOLICITED		0x0080u

#define VIRTIO_RDMA_WC_SEND			0u
#define VIRTIO_RDMA_WC_RDMA_WRITE		1u
#define VIRTIO_RDMA_WC_RDMA_READ		2u
#define VIRTIO_RDMA_WC_COMP_SWAP		3u
#define VIRTIO_RDMA_WC_FETCH_ADD		4u
#define VIRTIO_RDMA_WC_BIND_MW			5u
#define VIRTIO_RDMA_WC_LOCAL_INV		6u
#define VIRTIO_RDMA_WC_FLUSH			8u
#define VIRTIO_RDMA_WC_ATOMIC_WRITE		9u
#define VIRTIO_RDMA_WC_REG_MR			10u
#define VIRTIO_RDMA_WC_RECV			128u
#define VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM	129u

#define VIRTIO_RDMA_WC_STATUS_SUCCESS		0u
#define VIRTIO_RDMA_WC_STATUS_LOC_LEN_ERR	1u
#define VIRTIO_RDMA_WC_STATUS_LOC_QP_OP_ERR	2u
#define VIRTIO_RDMA_WC_STATUS_LOC_PROT_ERR	4u
#define VIRTIO_RDMA_WC_STATUS_WR_FLUSH_ERR	5u
#define VIRTIO_RDMA_WC_STATUS_MW_BIND_ERR	6u
#define VIRTIO_RDMA_WC_STATUS_BAD_RESP_ERR	7u
#define VIRTIO_RDMA_WC_STATUS_LOC_ACCESS_ERR	8u
#define VIRTIO_RDMA_WC_STATUS_REM_INV_REQ_ERR	9u
#define VIRTIO_RDMA_WC_STATUS_REM_ACCESS_ERR	10u
#define VIRTIO_RDMA_WC_STATUS_REM_OP_ERR	11u
#define VIRTIO_RDMA_WC_STATUS_RETRY_EXC_ERR	12u
#define VIRTIO_RDMA_WC_STATUS_RNR_RETRY_EXC_ERR	13u
#define VIRTIO_RDMA_WC_STATUS_FATAL_ERR		19u
#define VIRTIO_RDMA_WC_STATUS_GENERAL_ERR	21u
#define VIRTIO_RDMA_WC_STATUS_DISCARDED		255u	/* the driver's, over a stale entry */

/* ---- Events ---------------------------------------------------------------------------------- */
struct virtio_rdma_comp_event {
	__le32 cqn;
	__le32 arm_seq;
};						/* 8 bytes */

struct virtio_rdma_async_event {
	__le32 type;		/* VIRTIO_RDMA_EVENT_* */
	__le32 object;		/* CQN, QPN, SRQN or port number, as the type tells */
	__le32 ctx;
	__le32 reserved;
};						/* 16 bytes */

#define VIRTIO_RDMA_EVENT_CQ_ERR		0u
#define VIRTIO_RDMA_EVENT_QP_FATAL		1u
#define VIRTIO_RDMA_EVENT_QP_REQ_ERR		2u
#define VIRTIO_RDMA_EVENT_QP_ACCESS_ERR		3u
#define VIRTIO_RDMA_EVENT_COMM_EST		4u
#define VIRTIO_RDMA_EVENT_SQ_DRAINED		5u
#define VIRTIO_RDMA_EVENT_DEVICE_FATAL		8u
#define VIRTIO_RDMA_EVENT_PORT_ACTIVE		9u
#define VIRTIO_RDMA_EVENT_PORT_ERR		10u
#define VIRTIO_RDMA_EVENT_SRQ_ERR		14u
#define VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED	15u
#define VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED	16u
#define VIRTIO_RDMA_EVENT_GID_CHANGE		18u

/* ---- Commands -------------------------------------------------------------------------------- */
struct virtio_rdma_cmd_hdr {
	__le16 opcode;
	__le16 reserved0;
	__le32 ctx;		/* context that owns the object; 0 is the kernel's */
	__le64 reserved1;
};						/* 16 bytes, then the request */

struct virtio_rdma_resp_hdr {
	__le32 status;
	__le32 reserved;
};						/* 8 bytes, then the response */

#define VIRTIO_RDMA_CMD_INIT			0x01u
#define VIRTIO_RDMA_CMD_SHUTDOWN		0x02u
#define VIRTIO_RDMA_CMD_KEEPALIVE		0x03u
#define VIRTIO_RDMA_CMD_QUERY_DEVICE		0x04u
#define VIRTIO_RDMA_CMD_QUERY_PORT		0x05u
#define VIRTIO_RDMA_CMD_GID_SET			0x06u
#define VIRTIO_RDMA_CMD_QUERY_COUNTERS		0x07u
#define VIRTIO_RDMA_CMD_CONTEXT_CREATE		0x10u
#define VIRTIO_RDMA_CMD_CONTEXT_DESTROY		0x11u
#define VIRTIO_RDMA_CMD_DB_PAGE_ADD		0x12u
#define VIRTIO_RDMA_CMD_PD_CREATE		0x18u
#define VIRTIO_RDMA_CMD_PD_DESTROY		0x19u
#define VIRTIO_RDMA_CMD_MR_REG			0x20u
#define VIRTIO_RDMA_CMD_MR_DMA			0x21u
#define VIRTIO_RDMA_CMD_MR_ALLOC		0x22u
#define VIRTIO_RDMA_CMD_MR_REREG		0x23u
#define VIRTIO_RDMA_CMD_MR_DEREG		0x24u
#define VIRTIO_RDMA_CMD_MW_ALLOC		0x25u
#define VIRTIO_RDMA_CMD_MW_DEALLOC		0x26u
#define VIRTIO_RDMA_CMD_CQ_CREATE		0x28u
#define VIRTIO_RDMA_CMD_CQ_DESTROY		0x29u
#define VIRTIO_RDMA_CMD_CQ_RESIZE		0x2au
#define VIRTIO_RDMA_CMD_CQ_MODERATE		0x2bu
#define VIRTIO_RDMA_CMD_SRQ_CREATE		0x30u
#define VIRTIO_RDMA_CMD_SRQ_DESTROY		0x31u
#define VIRTIO_RDMA_CMD_SRQ_MODIFY		0x32u
#define VIRTIO_RDMA_CMD_SRQ_QUERY		0x33u
#define VIRTIO_RDMA_CMD_QP_CREATE		0x38u
#define VIRTIO_RDMA_CMD_QP_DESTROY		0x39u
#define VIRTIO_RDMA_CMD_QP_MODIFY		0x3au
#define VIRTIO_RDMA_CMD_QP_QUERY		0x3bu
#define VIRTIO_RDMA_CMD_AH_CREATE		0x40u
#define VIRTIO_RDMA_CMD_AH_DESTROY		0x41u
#define VIRTIO_RDMA_CMD_MCAST_ATTACH		0x44u
#define VIRTIO_RDMA_CMD_MCAST_DETACH		0x45u

/* Command status, and the errno that a driver answers with. */
#define VIRTIO_RDMA_OK				0u
#define VIRTIO_RDMA_ERR_INVAL			1u	/* EINVAL */
#define VIRTIO_RDMA_ERR_NOMEM			2u	/* ENOMEM: a limit or the device's memory */
#define VIRTIO_RDMA_ERR_NOTSUPP			3u	/* EOPNOTSUPP */
#define VIRTIO_RDMA_ERR_NOENT			4u	/* EINVAL: no such object in this context */
#define VIRTIO_RDMA_ERR_BUSY			5u	/* EBUSY */
#define VIRTIO_RDMA_ERR_PERM			6u	/* EPERM: address or peer not allowed */
#define VIRTIO_RDMA_ERR_FAULT			7u	/* EFAULT: page list outside guest memory */
#define VIRTIO_RDMA_ERR_EXIST			8u	/* EEXIST */
#define VIRTIO_RDMA_ERR_STATE			9u	/* EIO: INIT has not been accepted */
#define VIRTIO_RDMA_ERR_FATAL			10u	/* EIO: the NIC failed; reset it */
#define VIRTIO_RDMA_ERR_UNREACH			11u	/* EHOSTUNREACH: no way to the address */

struct virtio_rdma_init_req {
	__le32 abi_version;
	__le32 reserved;
	__le64 nonce;
	__le64 status_page;
	__le64 caps;
};						/* 32 */
struct virtio_rdma_init_resp {
	__le32 abi_version;
	__le32 reserved;
	__le64 caps;
};						/* 16 */

struct virtio_rdma_keepalive_req {
	__le64 nonce;
};						/* 8 */

#define VIRTIO_RDMA_CAP_ATOMIC			(1u << 0)
#define VIRTIO_RDMA_CAP_ATOMIC_GLOB		(1u << 1)	/* atomic against guests' CPUs */
#define VIRTIO_RDMA_CAP_SRQ			(1u << 2)
#define VIRTIO_RDMA_CAP_UC			(1u << 3)
#define VIRTIO_RDMA_CAP_UD			(1u << 4)
/* REG_MR, LOCAL_INV, SEND_WITH_INV. */
#define VIRTIO_RDMA_CAP_MEM_MGT			(1u << 5)
#define VIRTIO_RDMA_CAP_MW_TYPE1		(1u << 6)
#define VIRTIO_RDMA_CAP_MW_TYPE2		(1u << 7)	/* with LOCAL_INV, SEND_WITH_INV */
#define VIRTIO_RDMA_CAP_CQ_RESIZE		(1u << 8)
#define VIRTIO_RDMA_CAP_CQ_MODERATE		(1u << 9)
#define VIRTIO_RDMA_CAP_SRQ_RESIZE		(1u << 10)
#define VIRTIO_RDMA_CAP_MCAST			(1u << 11)
#define VIRTIO_RDMA_CAP_MR_REREG		(1u << 12)
#define VIRTIO_RDMA_CAP_ZERO_BASED		(1u << 13)
#define VIRTIO_RDMA_CAP_DMA_MR			(1u << 14)
#define VIRTIO_RDMA_CAP_SQD			(1u << 15)
#define VIRTIO_RDMA_CAP_FLUSH			(1u << 16)	/* to global visibility */
#define VIRTIO_RDMA_CAP_ATOMIC_WRITE		(1u << 17)
#define VIRTIO_RDMA_CAP_BASE			0x0003ffffu

struct virtio_rdma_query_device_resp {
	__le64 guid;
	__le64 caps;
	__le64 max_mr_size;
	__le64 max_mr_bytes;
	__le64 page_size_cap;
	__le64 fw_ver;
	__le64 clock_khz;
	__le32 vendor_id;
	__le32 vendor_part_id;
	__le32 hw_ver;
	__le32 max_contexts;
	__le32 max_pd;
	__le32 max_mr;
	__le32 max_mw;
	__le32 max_ah;
	__le32 max_cq;
	__le32 max_cqe;
	__le32 max_qp;
	__le32 max_qp_wr;
	__le32 max_send_sge;
	__le32 max_recv_sge;
	__le32 max_rd_sge;
	__le32 max_inline;
	__le32 max_srq;
	__le32 max_srq_wr;
	__le32 max_srq_sge;
	__le32 max_rd_atom;
	__le32 max_init_rd_atom;
	__le32 max_fast_reg_pages;
	__le32 max_mcast_groups;
	__le32 max_mcast_qp_attach;
	__le32 local_ca_ack_delay;
	__le32 keepalive_ms;
	__le32 max_pkeys;
	__le32 reserved;
};						/* 56 + 28 * 4 = 168 */

struct virtio_rdma_query_port_resp {
	__le32 max_msg_sz;
	__le32 gid_tbl_len;
	__le32 pkey_tbl_len;
	__le32 bad_pkey_cntr;
	__le32 qkey_viol_cntr;
	__u8 state;		/* IB_PORT_*: 1 down, 4 active */
	__u8 phys_state;	/* 3 disabled, 5 link up */
	__u8 max_mtu;		/* IB_MTU_*: 5 is 4096 */
	__u8 active_mtu;
	__u8 active_speed;	/* IB_SPEED_* */
	__u8 active_width;	/* IB_WIDTH_* */
	__u8 reserved[6];
};						/* 32 */

#define VIRTIO_RDMA_GID_NONE			0u
#define VIRTIO_RDMA_GID_ROCE_V2			2u
struct virtio_rdma_gid_set_req {
	__le16 index;
	__u8 type;		/* VIRTIO_RDMA_GID_*: NONE removes */
	__u8 reserved[5];
	__u8 gid[16];
};						/* 24 */

struct virtio_rdma_query_counters_resp {
	__le64 tx_bytes;
	__le64 rx_bytes;
	__le64 tx_messages;
	__le64 rx_messages;
	__le64 rnr_naks_sent;
	__le64 rnr_naks_received;
	__le64 ack_timeouts;
	__le64 access_errors;
	__le64 request_errors;
	__le64 completion_errors;
	__le64 receive_drops;
	__le64 events_coalesced;
	__le64 completions;
	__le64 events;
	__le64 commands;
	__le64 reserved[1];
};						/* 128 */

struct virtio_rdma_context_create_req {
	__le64 db_page;
};						/* 8 */
struct virtio_rdma_context_create_resp {
	__le32 ctx;
	__le32 kick_queue;	/* virtqueue index that this context kicks */
};						/* 8 */

struct virtio_rdma_db_page_add_req {
	__le64 db_page;
};						/* 8 */
struct virtio_rdma_db_page_add_resp {
	__le32 page;
	__le32 reserved;
};						/* 8 */

/* PD_DESTROY, MR_DEREG, MW_DEALLOC, CQ_DESTROY, SRQ_DESTROY, SRQ_QUERY, QP_DESTROY, QP_QUERY,
 * AH_DESTROY: the object. CONTEXT_DESTROY names the context in the header and has no body. */
struct virtio_rdma_object_req {
	__le32 object;
	__le32 reserved;
};						/* 8 */
/* PD_CREATE, MW_ALLOC, CQ_CREATE, AH_CREATE, MR_ALLOC. */
struct virtio_rdma_object_resp {
	__le32 object;
	__le32 reserved;
};						/* 8 */

#define VIRTIO_RDMA_ACCESS_LOCAL_WRITE		0x01u
#define VIRTIO_RDMA_ACCESS_REMOTE_WRITE		0x02u
#define VIRTIO_RDMA_ACCESS_REMOTE_READ		0x04u
#define VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC	0x08u
#define VIRTIO_RDMA_ACCESS_MW_BIND		0x10u
#define VIRTIO_RDMA_ACCESS_ZERO_BASED		0x20u
#define VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL		0x100u
#define VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT	0x200u
/* The memory is its owner's to copy; only for processes. */
#define VIRTIO_RDMA_ACCESS_MIRRORED	0x40000000u
#define VIRTIO_RDMA_ACCESS_OPTIONAL_MASK	0x3ff00000u	/* accepted and ignored */

struct virtio_rdma_mr_reg_req {
	__le32 pdn;
	__le32 access;
	__le64 iova;
	__le64 length;
	struct virtio_rdma_page_list pages;
};						/* 48 */
struct virtio_rdma_mr_resp {
	__le32 lkey;
	__le32 rkey;
};						/* 8: MR_REG, MR_DMA, MR_REREG */

struct virtio_rdma_mr_dma_req {
	__le32 pdn;
	__le32 access;
};						/* 8 */
struct virtio_rdma_mr_alloc_req {
	__le32 pdn;
	__le32 max_pages;
};						/* 8 */

#define VIRTIO_RDMA_REREG_TRANSLATION		1u
#define VIRTIO_RDMA_REREG_PD			2u
#define VIRTIO_RDMA_REREG_ACCESS		4u
struct virtio_rdma_mr_rereg_req {
	__le32 lkey;
	__le32 flags;
	__le32 pdn;
	__le32 access;
	__le64 iova;
	__le64 length;
	struct virtio_rdma_page_list pages;
};						/* 56 */

#define VIRTIO_RDMA_MW_TYPE1			1u
#define VIRTIO_RDMA_MW_TYPE2			2u
struct virtio_rdma_mw_alloc_req {
	__le32 pdn;
	__le32 type;
};						/* 8 */

struct virtio_rdma_cq_create_req {
	__le32 entries;		/* power of two */
	__le32 vector;
	struct virtio_rdma_page_list ring;
};						/* 32 */
struct virtio_rdma_cq_resize_req {
	__le32 cqn;
	__le32 entries;
	__le32 requested;	/* what the application asked for, before rounding */
	__le32 reserved;
	struct virtio_rdma_page_list ring;
};						/* 40 */
struct virtio_rdma_cq_moderate_req {
	__le32 cqn;
	__le16 count;
	__le16 period_us;
};						/* 8 */

struct virtio_rdma_srq_create_req {
	__le32 pdn;
	__le32 entries;		/* power of two */
	__le32 max_wr;		/* <= entries: what was asked for */
	__le32 max_sge;
	__le32 limit;
	__u8 log2_stride;
	__u8 reserved[3];
	struct virtio_rdma_page_list ring;
};						/* 48 */
struct virtio_rdma_srq_create_resp {
	__le32 srqn;
	__le32 db;		/* doorbell number */
};						/* 8 */
#define VIRTIO_RDMA_SRQ_MAX_WR			1u
#define VIRTIO_RDMA_SRQ_LIMIT			2u
struct virtio_rdma_srq_modify_req {
	__le32 srqn;
	__le32 mask;		/* VIRTIO_RDMA_SRQ_MAX_WR | VIRTIO_RDMA_SRQ_LIMIT */
	__le32 entries;
	__le32 max_wr;
	__le32 limit;
	__le32 reserved;
	struct virtio_rdma_page_list ring;
};						/* 48 */
struct virtio_rdma_srq_query_resp {
	__le32 max_wr;
	__le32 max_sge;
	__le32 limit;
	__le32 reserved;
};						/* 16 */

#define VIRTIO_RDMA_QPT_GSI			1u
#define VIRTIO_RDMA_QPT_RC			2u
#define VIRTIO_RDMA_QPT_UC			3u
#define VIRTIO_RDMA_QPT_UD			4u
#define VIRTIO_RDMA_GSI_QPN			1u
#define VIRTIO_RDMA_NO_SRQ			0xffffffffu
#define VIRTIO_RDMA_QP_SIG_ALL			1u	/* flags: every send is signaled */

struct virtio_rdma_qp_create_req {
	__le32 pdn;
	__le32 type;
	__le32 flags;
	__le32 send_cqn;
	__le32 recv_cqn;
	__le32 srqn;
	__le32 sq_entries;	/* ring sizes: powers of two, or 0 */
	__le32 rq_entries;
	__le32 max_send_wr;	/* <= entries: what was asked for */
	__le32 max_recv_wr;
	__le16 max_send_sge;
	__le16 max_recv_sge;
	__le16 max_inline;
	__u8 sq_log2_stride;
	__u8 rq_log2_stride;
	struct virtio_rdma_page_list sq;
	struct virtio_rdma_page_list rq;
};						/* 96 */
struct virtio_rdma_qp_create_resp {
	__le32 qpn;
	__le32 sq_db;		/* doorbell numbers; DB_NONE where there is no ring */
	__le32 rq_db;
	__le32 reserved;
};						/* 16 */

#define VIRTIO_RDMA_QPS_RESET			0u
#define VIRTIO_RDMA_QPS_INIT			1u
#define VIRTIO_RDMA_QPS_RTR			2u
#define VIRTIO_RDMA_QPS_RTS			3u
#define VIRTIO_RDMA_QPS_SQD			4u
#define VIRTIO_RDMA_QPS_SQE			5u
#define VIRTIO_RDMA_QPS_ERR			6u

#define VIRTIO_RDMA_QP_STATE			(1u << 0)
#define VIRTIO_RDMA_QP_CUR_STATE		(1u << 1)
#define VIRTIO_RDMA_QP_EN_SQD_ASYNC_NOTIFY	(1u << 2)
#define VIRTIO_RDMA_QP_ACCESS_FLAGS		(1u << 3)
#define VIRTIO_RDMA_QP_PKEY_INDEX		(1u << 4)
#define VIRTIO_RDMA_QP_PORT			(1u << 5)
#define VIRTIO_RDMA_QP_QKEY			(1u << 6)
#define VIRTIO_RDMA_QP_AV			(1u << 7)
#define VIRTIO_RDMA_QP_PATH_MTU			(1u << 8)
#define VIRTIO_RDMA_QP_TIMEOUT			(1u << 9)
#define VIRTIO_RDMA_QP_RETRY_CNT		(1u << 10)
#define VIRTIO_RDMA_QP_RNR_RETRY		(1u << 11)
#define VIRTIO_RDMA_QP_RQ_PSN			(1u << 12)
#define VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC		(1u << 13)
#define VIRTIO_RDMA_QP_ALT_PATH			(1u << 14)
#define VIRTIO_RDMA_QP_MIN_RNR_TIMER		(1u << 15)
#define VIRTIO_RDMA_QP_SQ_PSN			(1u << 16)
#define VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC	(1u << 17)
#define VIRTIO_RDMA_QP_PATH_MIG_STATE		(1u << 18)
#define VIRTIO_RDMA_QP_CAP			(1u << 19)
#define VIRTIO_RDMA_QP_DEST_QPN			(1u << 20)
#define VIRTIO_RDMA_QP_RATE_LIMIT		(1u << 25)

#define VIRTIO_RDMA_AV_GRH			1u	/* flags: required, RoCE always has a GRH */
struct virtio_rdma_av {
	__u8 dgid[16];
	__u8 dmac[6];
	__le16 sgid_index;
	__le32 flow_label;
	__u8 hop_limit;
	__u8 traffic_class;
	__u8 sl;
	__u8 port_num;
	__u8 flags;
	__u8 static_rate;
	__u8 reserved[6];
};						/* 40 */

struct virtio_rdma_qp_attr {
	__le32 mask;
	__u8 qp_state;
	__u8 cur_qp_state;
	__u8 path_mtu;		/* IB_MTU_* */
	__u8 path_mig_state;
	__le32 qkey;
	__le32 rq_psn;
	__le32 sq_psn;
	__le32 dest_qpn;
	__le32 qp_access_flags;
	__le16 pkey_index;
	__le16 alt_pkey_index;
	__u8 en_sqd_async_notify;
	__u8 sq_draining;
	__u8 max_rd_atomic;
	__u8 max_dest_rd_atomic;
	__u8 min_rnr_timer;
	__u8 port_num;
	__u8 timeout;
	__u8 retry_cnt;
	__u8 rnr_retry;
	__u8 alt_port_num;
	__u8 alt_timeout;
	__u8 reserved0;
	__le32 rate_limit;
	struct virtio_rdma_av ah;
	struct virtio_rdma_av alt_ah;
	__le32 reserved1[2];
};						/* 136 */

struct virtio_rdma_qp_modify_req {
	__le32 qpn;
	__le32 reserved;
	struct virtio_rdma_qp_attr attr;
};						/* 144 */
struct virtio_rdma_qp_query_resp {
	struct virtio_rdma_qp_attr attr;
};						/* 136 */

struct virtio_rdma_ah_create_req {
	__le32 pdn;
	__le32 reserved;
	struct virtio_rdma_av av;
};						/* 48 */

struct virtio_rdma_mcast_req {
	__le32 qpn;
	__le32 reserved;
	__u8 mgid[16];
};						/* 24 */

#endif /* VIRTIO_RDMA_ABI_H */
