// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * What a guest's kernel driver does for its provider, done by a session: commands of the device
 * with page lists of this process's own addresses, and what libibverbs wants to find in its
 * objects. The numbers of the device are the objects' handles.
 */
#define VRDMA_KERNEL_ITSELF
#include "kernel.h"

#include <stdio.h>
#include <unistd.h>

#include "private.h"
#include "session.h"
#include "virtio_rdma.h"

/*
 * How the guest's provider names what it maps: the status page, and a doorbell page by its address.
 */
#define STATUS_MMAP 1

static size_t ring_len(uint32_t entries, uint8_t log2_stride, int control_block)
{
	size_t len = (size_t)entries << log2_stride;

	return control_block ?
	       align(len, VIRTIO_RDMA_RING_CTRL_ALIGN) + VIRTIO_RDMA_CTRL_SIZE : len;
}

/* A ring that the device can reach, as a list. */
static int ring(struct ibv_context *context, uint64_t addr, size_t len,
		struct virtio_rdma_page_list *list)
{
	const void *at = (const void *)(uintptr_t)addr;
	int ret = vrdma_share(vrdma_session_of(context), at, len);

	*list = vrdma_list(at, len);
	return ret;
}

/* ---- Contexts, pages ------------------------------------------------------------------------- */

/*
 * The device looks at doorbell pages, and writes to them, until it has seen to a session's end:
 * later than the session ends here. So they are of a file of the session's own, and no page of it
 * ever serves anything else.
 */
static int make_doorbells(struct vrdma_session *session)
{
	int fd = vrdma_sealed_file(VRDMA_DB_LEN), ret;
	void *base;

	if (fd < 0)
		return vrdma_no_file();
	base = mmap(NULL, VRDMA_DB_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	ret = base == MAP_FAILED ? ENOMEM : 0;
	if (!ret) {
		madvise(base, VRDMA_DB_LEN, MADV_DONTFORK);
		ret = vrdma_memory_add(session, base, VRDMA_DB_LEN, fd, 0);
		if (ret)
			munmap(base, VRDMA_DB_LEN);
	}
	close(fd);
	if (!ret)
		session->doorbells = base;
	return ret;
}

/*
 * The device numbers pages in the order in which it gets them (5.4), so the page of a number is
 * where it is in the file. Others may know a new page by its doorbells before whoever added it goes
 * on.
 */
static uint8_t *db_page(const struct vrdma_session *session, uint32_t number)
{
	return number < VRDMA_DB_PAGES ? session->doorbells + number * VRDMA_DB_PAGE : NULL;
}

static uint32_t db_count(const struct vrdma_session *session)
{
	return __atomic_load_n(&session->db_count, __ATOMIC_ACQUIRE);
}

/* Under the lock `adding`. A page that is refused is the next one's. */
static int add_db_page(struct vrdma_session *session, struct ibv_context *context, uint16_t opcode)
{
	uint32_t count = session->db_count, number = 0;
	__le64 addr = htole64((uintptr_t)db_page(session, count));
	__le32 resp[2];
	int ret;

	if (!addr)
		return ENOMEM;
	ret = vrdma_command(context, opcode, &addr, sizeof(addr), resp, sizeof(resp));
	if (ret)
		return ret;
	if (opcode == VIRTIO_RDMA_CMD_DB_PAGE_ADD)
		number = le32toh(resp[0]);
	if (number != count)
		return EIO;
	__atomic_store_n(&session->db_count, count + 1, __ATOMIC_RELEASE);
	return 0;
}

static int first_db_page(struct vrdma_session *session, struct ibv_context *context)
{
	int before, ret;

	vrdma_hold(&session->adding, &before);
	ret = add_db_page(session, context, VIRTIO_RDMA_CMD_CONTEXT_CREATE);
	vrdma_let_go(&session->adding, &before);
	return ret;
}

/* Whether there is one more than there were: of this thread, or of another meanwhile. */
static bool another_db_page(struct vrdma_session *session, struct ibv_context *context,
			    uint32_t count)
{
	bool more;
	int before;

	vrdma_hold(&session->adding, &before);
	more = session->db_count != count ||
	       !add_db_page(session, context, VIRTIO_RDMA_CMD_DB_PAGE_ADD);
	vrdma_let_go(&session->adding, &before);
	return more;
}

/*
 * Makes an object that has doorbells: the device gives them, and where it has no slot left another
 * page helps (5.4). It refuses a page to a context that has room, so what is refused for another
 * reason is not asked for without end.
 */
static int make_with_doorbells(struct ibv_context *context, uint16_t opcode, struct vrdma_made how,
			       const void *req, size_t req_len, void *made, size_t made_len)
{
	struct vrdma_session *session = vrdma_session_of(context);
	uint32_t count;
	int ret;

	do {
		count = session ? db_count(session) : 0;
		ret = vrdma_command_making(context, opcode, how, req, req_len, made, made_len);
	} while (ret == ENOMEM && session && another_db_page(session, context, count));
	return ret;
}

/* The guest's provider asks for a mapping of the page; it is the page itself. */
static uint64_t db_mmap(struct ibv_context *context, uint32_t doorbell)
{
	struct vrdma_session *session = vrdma_session_of(context);
	uint32_t slot = doorbell & ((1u << VIRTIO_RDMA_DB_PAGE_SHIFT) - 1);
	uint8_t *page;

	if (doorbell == VIRTIO_RDMA_DB_NONE || !session || slot >= VIRTIO_RDMA_DB_SLOTS)
		return 0;
	page = db_page(session, doorbell >> VIRTIO_RDMA_DB_PAGE_SHIFT);
	if (!page)
		return 0;
	/* The slot may have served another queue. */
	__atomic_store_n((uint32_t *)(page + VIRTIO_RDMA_DB_INDEX) + slot, 0, __ATOMIC_RELEASE);
	return (uintptr_t)page;
}

void *vrdma_local_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
	void *page;

	if (flags & MAP_ANONYMOUS) {
		page = vrdma_pages_alloc(len);
		return page ? page : MAP_FAILED;
	}
	if (offset == STATUS_MMAP)
		return mmap(addr, len, prot, flags, fd, 0);
	if (offset)
		return (void *)(uintptr_t)offset;
	errno = EINVAL;
	return MAP_FAILED;
}

int vrdma_local_munmap(void *addr, size_t len)
{
	return vrdma_pages_free(addr, len) ? 0 : munmap(addr, len);
}

static void limits(struct virtio_rdma_ucontext_resp *drv,
		   const struct virtio_rdma_query_device_resp *attr)
{
	drv->caps = le64toh(attr->caps);
	drv->max_inline = le32toh(attr->max_inline);
	drv->max_send_sge = le32toh(attr->max_send_sge);
	drv->max_recv_sge = le32toh(attr->max_recv_sge);
	drv->max_srq_sge = le32toh(attr->max_srq_sge);
	drv->max_qp_wr = le32toh(attr->max_qp_wr);
	drv->max_srq_wr = le32toh(attr->max_srq_wr);
	drv->max_cqe = le32toh(attr->max_cqe);
}

int vrdma_local_get_context(struct verbs_context *vctx, struct ibv_get_context *cmd,
			    size_t cmd_size, struct ib_uverbs_get_context_resp *resp,
			    size_t resp_size)
{
	struct ibv_context *context = &vctx->context;
	struct vrdma_session *session = vrdma_session_of(context);
	struct virtio_rdma_ucontext_resp *drv = (void *)((uint8_t *)resp + sizeof(*resp));
	struct virtio_rdma_query_device_resp attr;
	int ret;

	if (!session)
		return EIO;
	ret = vrdma_command(context, VIRTIO_RDMA_CMD_QUERY_DEVICE, NULL, 0, &attr, sizeof(attr));
	if (!ret)
		ret = make_doorbells(session);
	if (!ret)
		ret = first_db_page(session, context);
	if (ret)
		return ret;
	session->attr = attr;
	limits(drv, &attr);
	drv->alive = session->alive;
	drv->status_mmap = STATUS_MMAP;
	drv->db_mmap = (uintptr_t)db_page(session, 0);
	context->num_comp_vectors = (int)session->comp_vectors;
	return 0;
}

int vrdma_local_query_context(struct ibv_context *context, struct ibv_command_buffer *driver)
{
	return EOPNOTSUPP;
}

/* ---- Device and port ------------------------------------------------------------------------- */

/* As the guest's kernel driver tells them (guest/kernel/port.c). */
static uint64_t device_flags(uint64_t caps)
{
	uint64_t flags = IB_UVERBS_DEVICE_RC_RNR_NAK_GEN | IB_UVERBS_DEVICE_SYS_IMAGE_GUID |
			 IB_UVERBS_DEVICE_PORT_ACTIVE_EVENT;

	if (caps & VIRTIO_RDMA_CAP_SRQ_RESIZE)
		flags |= IB_UVERBS_DEVICE_SRQ_RESIZE;
	if (caps & VIRTIO_RDMA_CAP_MEM_MGT)
		flags |= IB_UVERBS_DEVICE_MEM_MGT_EXTENSIONS;
	if (caps & VIRTIO_RDMA_CAP_MW_TYPE1)
		flags |= IB_UVERBS_DEVICE_MEM_WINDOW;
	if (caps & VIRTIO_RDMA_CAP_MW_TYPE2)
		flags |= IB_UVERBS_DEVICE_MEM_WINDOW_TYPE_2B;
	if (caps & VIRTIO_RDMA_CAP_FLUSH)
		flags |= IB_UVERBS_DEVICE_FLUSH_GLOBAL;
	if (caps & VIRTIO_RDMA_CAP_ATOMIC_WRITE)
		flags |= IB_UVERBS_DEVICE_ATOMIC_WRITE;
	return flags;
}

static void device_attr(struct ibv_device_attr *a, const struct virtio_rdma_query_device_resp *r)
{
	a->node_guid = htobe64(le64toh(r->guid));
	a->sys_image_guid = a->node_guid;
	a->max_mr_size = le64toh(r->max_mr_size);
	a->page_size_cap = le64toh(r->page_size_cap);
	a->vendor_id = le32toh(r->vendor_id);
	a->vendor_part_id = le32toh(r->vendor_part_id);
	a->hw_ver = le32toh(r->hw_ver);
	a->max_qp = (int)le32toh(r->max_qp);
	a->max_qp_wr = (int)le32toh(r->max_qp_wr);
	a->device_cap_flags = (unsigned int)device_flags(le64toh(r->caps));
	a->max_sge = (int)le32toh(r->max_send_sge);
	a->max_sge_rd = (int)le32toh(r->max_rd_sge);
	a->max_cq = (int)le32toh(r->max_cq);
	a->max_cqe = (int)le32toh(r->max_cqe);
	a->max_mr = (int)le32toh(r->max_mr);
	a->max_pd = (int)le32toh(r->max_pd);
	a->max_qp_rd_atom = (int)le32toh(r->max_rd_atom);
	a->max_res_rd_atom = a->max_qp_rd_atom;
	a->max_qp_init_rd_atom = (int)le32toh(r->max_init_rd_atom);
	a->atomic_cap = IBV_ATOMIC_GLOB;
	a->max_mw = (int)le32toh(r->max_mw);
	a->max_mcast_grp = (int)le32toh(r->max_mcast_groups);
	a->max_mcast_qp_attach = (int)le32toh(r->max_mcast_qp_attach);
	a->max_total_mcast_qp_attach = a->max_mcast_grp * a->max_mcast_qp_attach;
	a->max_ah = (int)le32toh(r->max_ah);
	a->max_srq = (int)le32toh(r->max_srq);
	a->max_srq_wr = (int)le32toh(r->max_srq_wr);
	a->max_srq_sge = (int)le32toh(r->max_srq_sge);
	a->max_pkeys = 1;
	a->local_ca_ack_delay = (uint8_t)le32toh(r->local_ca_ack_delay);
	a->phys_port_cnt = 1;
}

int vrdma_local_query_device_any(struct ibv_context *context,
				 const struct ibv_query_device_ex_input *input,
				 struct ibv_device_attr_ex *attr, size_t attr_size,
				 struct ib_uverbs_ex_query_device_resp *resp, size_t *resp_size)
{
	struct virtio_rdma_query_device_resp found;
	const struct vrdma_session *inherited = vrdma_session_inherited(context);
	int ret = 0;

	if ((input && input->comp_mask) || attr_size < sizeof(attr->orig_attr))
		return EINVAL;
	if (inherited && !vrdma_session_of(context))
		found = inherited->attr;
	else
		ret = vrdma_command(context, VIRTIO_RDMA_CMD_QUERY_DEVICE, NULL, 0, &found,
				    sizeof(found));
	if (ret)
		return ret;
	memset(attr, 0, attr_size);
	device_attr(&attr->orig_attr, &found);
	if (attr_size >= offsetof(struct ibv_device_attr_ex, hca_core_clock) +
	    sizeof(attr->hca_core_clock)) {
		attr->completion_timestamp_mask = UINT64_MAX;
		attr->hca_core_clock = le64toh(found.clock_khz);
	}
	if (attr_size >= offsetof(struct ibv_device_attr_ex, device_cap_flags_ex) +
				 sizeof(attr->device_cap_flags_ex))
		attr->device_cap_flags_ex = device_flags(le64toh(found.caps));
	if (attr_size >= offsetof(struct ibv_device_attr_ex, max_dm_size) +
	    sizeof(attr->max_dm_size))
		attr->max_dm_size = VRDMA_DM_SIZE;
	if (attr_size >= offsetof(struct ibv_device_attr_ex, phys_port_cnt_ex) +
	    sizeof(attr->phys_port_cnt_ex))
		attr->phys_port_cnt_ex = 1;
	memset(resp, 0, sizeof(*resp));
	resp->base.fw_ver = le64toh(found.fw_ver);
	return 0;
}

int vrdma_local_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr,
			   struct ibv_query_port *cmd, size_t cmd_size)
{
	struct virtio_rdma_query_port_resp found;
	struct vrdma_session *session = vrdma_session_of(context);
	int ret;

	if (port != 1)
		return EINVAL;
	ret = vrdma_command(context, VIRTIO_RDMA_CMD_QUERY_PORT, NULL, 0, &found, sizeof(found));
	if (ret)
		return ret;
	memset(attr, 0, sizeof(*attr));
	attr->state = found.state;
	attr->max_mtu = found.max_mtu;
	attr->active_mtu = found.active_mtu;
	attr->gid_tbl_len = session->addresses;
	attr->max_msg_sz = le32toh(found.max_msg_sz);
	attr->pkey_tbl_len = 1;
	attr->active_width = found.active_width;
	attr->active_speed = found.active_speed;
	attr->phys_state = found.phys_state;
	attr->link_layer = IBV_LINK_LAYER_ETHERNET;
	return 0;
}

/* ---- Domains --------------------------------------------------------------------------------- */

int vrdma_local_alloc_pd(struct ibv_context *context, struct ibv_pd *pd, struct ibv_alloc_pd *cmd,
			 size_t cmd_size, struct ib_uverbs_alloc_pd_resp *resp, size_t resp_size)
{
	struct virtio_rdma_object_resp made;
	int ret = vrdma_command(context, VIRTIO_RDMA_CMD_PD_CREATE, NULL, 0, &made, sizeof(made));

	if (ret)
		return ret;
	pd->context = context;
	pd->handle = le32toh(made.object);
	return 0;
}

int vrdma_local_dealloc_pd(struct ibv_pd *pd)
{
	return vrdma_destroy(pd->context, VIRTIO_RDMA_CMD_PD_DESTROY, pd->handle);
}

/* ---- Completion queues ----------------------------------------------------------------------- */

static uint32_t channel_number(struct ibv_context *context, struct ibv_comp_channel *of)
{
	struct vrdma_session *session = vrdma_session_of(context);
	struct vrdma_channel *channel;
	uint32_t number;

	if (!session || !of)
		return 0;
	vrdma_tables_lock(session);
	for (channel = session->channels; channel && channel->of != of; channel = channel->next)
		;
	number = channel ? channel->number : 0;
	vrdma_tables_unlock(session);
	return number;
}

int vrdma_local_create_cq(struct ibv_context *context, int cqe, struct ibv_comp_channel *channel,
			  int vector, struct ibv_cq *cq, struct ibv_create_cq *cmd, size_t cmd_size,
			  struct ib_uverbs_create_cq_resp *resp, size_t resp_size)
{
	const struct virtio_rdma_cq_req *drv = (void *)((uint8_t *)cmd + sizeof(*cmd));
	struct virtio_rdma_cq_resp *answer = (void *)((uint8_t *)resp + sizeof(*resp));
	struct vrdma_made how = { (uintptr_t)cq, channel ? channel_number(context, channel) : 0 };
	struct virtio_rdma_cq_create_req req = {
		.entries = htole32(drv->entries),
		.vector = htole32((uint32_t)vector),
	};
	struct virtio_rdma_object_resp made;
	int ret = ring(context, drv->buf, ring_len(drv->entries, VIRTIO_RDMA_CQE_LOG2_STRIDE, 1),
		       &req.ring);

	if (!ret)
		ret = vrdma_command_making(context, VIRTIO_RDMA_CMD_CQ_CREATE, how, &req,
					   sizeof(req), &made, sizeof(made));
	if (ret)
		return ret;
	cq->handle = le32toh(made.object);
	cq->cqe = (int)drv->entries;
	cq->context = context;
	cq->channel = channel;
	answer->cqn = cq->handle;
	ret = channel ? vrdma_sleeper_add(vrdma_session_of(context), cq) : 0;
	if (ret)
		(void)vrdma_destroy(context, VIRTIO_RDMA_CMD_CQ_DESTROY, cq->handle);
	return ret;
}

int vrdma_local_resize_cq(struct ibv_cq *cq, int cqe, struct ibv_resize_cq *cmd, size_t cmd_size,
			  struct ib_uverbs_resize_cq_resp *resp, size_t resp_size)
{
	const struct virtio_rdma_cq_req *drv = (void *)((uint8_t *)cmd + sizeof(*cmd));
	struct virtio_rdma_cq_resize_req req = {
		.cqn = htole32(cq->handle),
		.entries = htole32(drv->entries),
		.requested = htole32((uint32_t)cqe),
	};
	int ret = ring(cq->context, drv->buf,
		       ring_len(drv->entries, VIRTIO_RDMA_CQE_LOG2_STRIDE, 1), &req.ring);

	if (!ret)
		ret = vrdma_command(cq->context, VIRTIO_RDMA_CMD_CQ_RESIZE, &req, sizeof(req), NULL,
				    0);
	if (!ret)
		cq->cqe = (int)drv->entries;
	return ret;
}

int vrdma_local_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr,
			  struct ibv_modify_cq *cmd, size_t cmd_size)
{
	struct virtio_rdma_cq_moderate_req req = {
		.cqn = htole32(cq->handle),
		.count = htole16(attr->moderate.cq_count),
		.period_us = htole16(attr->moderate.cq_period),
	};

	if (attr->attr_mask != IBV_CQ_ATTR_MODERATE)
		return EINVAL;
	return vrdma_command(cq->context, VIRTIO_RDMA_CMD_CQ_MODERATE, &req, sizeof(req), NULL, 0);
}

/* Asynchronous events that nobody has read go. */
static void forget(struct ibv_context *context, void *object)
{
	struct vrdma_session *session = vrdma_session_of(context);

	if (!session)
		return;
	vrdma_tables_lock(session);
	vrdma_events_drop(session, &session->events, (uintptr_t)object,
			  sizeof(struct ib_uverbs_async_event_desc));
	vrdma_tables_unlock(session);
}

/* Those of a queue pair or a shared receive queue that were read are waited for. */
static void forget_and_wait(struct ibv_context *context, void *object, pthread_mutex_t *mutex,
			    pthread_cond_t *cond, const uint32_t *events)
{
	forget(context, object);
	/* A child of fork() acknowledges nothing of its parent's. */
	if (vrdma_session_of(context))
		vrdma_await_acks(mutex, cond, events, events);
}

/* The same of completion events. */
static void forget_completions(struct vrdma_session *session, struct ibv_cq *cq)
{
	struct vrdma_channel *channel;

	vrdma_sleeper_drop(session, cq);
	vrdma_tables_lock(session);
	for (channel = session->channels; channel; channel = channel->next) {
		if (channel->of == cq->channel)
			vrdma_events_drop(session, &channel->events, (uintptr_t)cq,
					  sizeof(struct ib_uverbs_comp_event_desc));
	}
	vrdma_tables_unlock(session);
}

int vrdma_local_destroy_cq(struct ibv_cq *cq)
{
	struct vrdma_session *session = vrdma_session_of(cq->context);
	int ret = vrdma_destroy(cq->context, VIRTIO_RDMA_CMD_CQ_DESTROY, cq->handle);

	if (ret)
		return ret;
	if (session && cq->channel)
		forget_completions(session, cq);
	forget(cq->context, cq);
	if (session)
		vrdma_await_acks(&cq->mutex, &cq->cond, &cq->comp_events_completed,
				 &cq->async_events_completed);
	return 0;
}

/* ---- Shared receive queues ------------------------------------------------------------------- */

int vrdma_local_create_srq(struct ibv_pd *pd, struct ibv_srq *srq, struct ibv_srq_init_attr *attr,
			   struct ibv_create_srq *cmd, size_t cmd_size,
			   struct ib_uverbs_create_srq_resp *resp, size_t resp_size)
{
	const struct virtio_rdma_srq_req *drv = (void *)((uint8_t *)cmd + sizeof(*cmd));
	struct virtio_rdma_srq_resp *answer = (void *)((uint8_t *)resp + sizeof(*resp));
	struct vrdma_made how = { (uintptr_t)srq, 0 };
	struct virtio_rdma_srq_create_req req = {
		.pdn = htole32(pd->handle),
		.entries = htole32(drv->entries),
		.max_wr = htole32(attr->attr.max_wr),
		.max_sge = htole32(attr->attr.max_sge),
		.log2_stride = drv->log2_stride,
	};
	struct virtio_rdma_srq_create_resp made;
	int ret = ring(pd->context, drv->buf, ring_len(drv->entries, drv->log2_stride, 1),
		       &req.ring);

	if (!ret)
		ret = make_with_doorbells(pd->context, VIRTIO_RDMA_CMD_SRQ_CREATE, how, &req,
					  sizeof(req), &made, sizeof(made));
	if (ret)
		return ret;
	srq->handle = le32toh(made.srqn);
	srq->context = pd->context;
	srq->pd = pd;
	pthread_mutex_init(&srq->mutex, NULL);
	pthread_cond_init(&srq->cond, NULL);
	answer->srqn = srq->handle;
	answer->db = le32toh(made.db);
	answer->db_mmap = db_mmap(pd->context, answer->db);
	return 0;
}

int vrdma_local_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask,
			   struct ibv_modify_srq *cmd, size_t cmd_size)
{
	const struct virtio_rdma_srq_req *drv = (void *)((uint8_t *)cmd + sizeof(*cmd));
	struct virtio_rdma_srq_modify_req req = {
		.srqn = htole32(srq->handle),
		.mask = htole32((uint32_t)mask),
		.max_wr = htole32(attr->max_wr),
		.limit = htole32(attr->srq_limit),
	};
	int ret = 0;

	if (mask & IBV_SRQ_MAX_WR) {
		req.entries = htole32(drv->entries);
		ret = ring(srq->context, drv->buf, ring_len(drv->entries, drv->log2_stride, 1),
			   &req.ring);
	}
	return ret ? ret : vrdma_command(srq->context, VIRTIO_RDMA_CMD_SRQ_MODIFY, &req,
					 sizeof(req), NULL, 0);
}

int vrdma_local_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, struct ibv_query_srq *cmd,
			  size_t cmd_size)
{
	struct virtio_rdma_object_req req = { .object = htole32(srq->handle) };
	struct virtio_rdma_srq_query_resp found;
	int ret = vrdma_command(srq->context, VIRTIO_RDMA_CMD_SRQ_QUERY, &req, sizeof(req), &found,
				sizeof(found));

	if (ret)
		return ret;
	attr->max_wr = le32toh(found.max_wr);
	attr->max_sge = le32toh(found.max_sge);
	attr->srq_limit = le32toh(found.limit);
	return 0;
}

int vrdma_local_destroy_srq(struct ibv_srq *srq)
{
	int ret = vrdma_destroy(srq->context, VIRTIO_RDMA_CMD_SRQ_DESTROY, srq->handle);
	struct vrdma_mirror *mirror = to_vctx(srq->context)->mirror;

	if (ret)
		return ret;
	forget_and_wait(srq->context, srq, &srq->mutex, &srq->cond, &srq->events_completed);
	if (mirror)
		vrdma_kept_forget(mirror, &to_vsrq(srq)->wq);
	return 0;
}

#include "kernel_qp.h"
