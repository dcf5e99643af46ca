/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * Queue pairs, address handles and groups: a part of kernel.c. Their attributes travel as those of
 * a guest's kernel do, whose header serves us: libibverbs' structure has members of the same names.
 */
#define ib_qp_attr ibv_qp_attr
#define cpu_to_le16 htole16
#define cpu_to_le32 htole32
#define le16_to_cpu le16toh
#define le32_to_cpu le32toh
typedef uint32_t u32;
#include "qp_attr.h"
#undef ib_qp_attr

static void av_to_wire(struct virtio_rdma_av *av, const struct ibv_ah_attr *attr)
{
	memcpy(av->dgid, attr->grh.dgid.raw, sizeof(av->dgid));
	av->sgid_index = htole16(attr->grh.sgid_index);
	av->flow_label = htole32(attr->grh.flow_label);
	av->hop_limit = attr->grh.hop_limit;
	av->traffic_class = attr->grh.traffic_class;
	av->sl = attr->sl;
	av->port_num = attr->port_num;
	av->flags = attr->is_global ? VIRTIO_RDMA_AV_GRH : 0;
	av->static_rate = attr->static_rate;
}

static void av_from_wire(struct ibv_ah_attr *attr, const struct virtio_rdma_av *av)
{
	memset(attr, 0, sizeof(*attr));
	memcpy(attr->grh.dgid.raw, av->dgid, sizeof(av->dgid));
	attr->grh.sgid_index = (uint8_t)le16toh(av->sgid_index);
	attr->grh.flow_label = le32toh(av->flow_label);
	attr->grh.hop_limit = av->hop_limit;
	attr->grh.traffic_class = av->traffic_class;
	attr->sl = av->sl;
	attr->port_num = av->port_num;
	attr->is_global = !!(av->flags & VIRTIO_RDMA_AV_GRH);
	attr->static_rate = av->static_rate;
}

static uint32_t qp_type(enum ibv_qp_type type)
{
	return type == IBV_QPT_RC ? VIRTIO_RDMA_QPT_RC :
	       type == IBV_QPT_UC ? VIRTIO_RDMA_QPT_UC : VIRTIO_RDMA_QPT_UD;
}

/*
 * Elements of a send. With private memory the device is to take as many as a slot has room for:
 * one of the program's may become several (mirror.c).
 */
static uint32_t send_elements(const struct ibv_qp_init_attr_ex *attr,
			      const struct virtio_rdma_qp_req *drv)
{
	const struct vrdma_context *ctx = to_vctx(attr->pd->context);
	uint32_t room;

	if (!drv->sq_entries || !__atomic_load_n(&ctx->mirror, __ATOMIC_ACQUIRE))
		return attr->cap.max_send_sge;
	room = ((1u << drv->sq_log2_stride) - VIRTIO_RDMA_SQ_WQE_DATA) /
	       (uint32_t)sizeof(struct virtio_rdma_sge);
	return room < ctx->max_send_sge ? room : ctx->max_send_sge;
}

static void qp_to_wire(struct virtio_rdma_qp_create_req *req,
		       const struct ibv_qp_init_attr_ex *attr, const struct virtio_rdma_qp_req *drv)
{
	req->pdn = htole32(attr->pd->handle);
	req->type = htole32(qp_type(attr->qp_type));
	req->flags = htole32(attr->sq_sig_all ? VIRTIO_RDMA_QP_SIG_ALL : 0);
	req->send_cqn = htole32(attr->send_cq->handle);
	req->recv_cqn = htole32(attr->recv_cq->handle);
	req->srqn = htole32(attr->srq ? attr->srq->handle : VIRTIO_RDMA_NO_SRQ);
	req->sq_entries = htole32(drv->sq_entries);
	req->rq_entries = htole32(drv->rq_entries);
	req->max_send_wr = htole32(attr->cap.max_send_wr);
	req->max_recv_wr = htole32(attr->cap.max_recv_wr);
	req->max_send_sge = htole16((uint16_t)send_elements(attr, drv));
	req->max_recv_sge = htole16((uint16_t)attr->cap.max_recv_sge);
	req->max_inline = htole16((uint16_t)attr->cap.max_inline_data);
	req->sq_log2_stride = drv->sq_log2_stride;
	req->rq_log2_stride = drv->rq_log2_stride;
}

static void qp_begin(struct ibv_context *context, struct verbs_qp *vqp,
		     const struct ibv_qp_init_attr_ex *attr)
{
	struct ibv_qp *qp = &vqp->qp;

	qp->context = context;
	qp->qp_context = attr->qp_context;
	qp->pd = attr->pd;
	qp->send_cq = attr->send_cq;
	qp->recv_cq = attr->recv_cq;
	qp->srq = attr->srq;
	qp->qp_type = attr->qp_type;
	qp->state = IBV_QPS_RESET;
	qp->events_completed = 0;
	pthread_mutex_init(&qp->mutex, NULL);
	pthread_cond_init(&qp->cond, NULL);
}

int vrdma_local_create_qp_ex(struct ibv_context *context, struct verbs_qp *vqp,
			     struct ibv_qp_init_attr_ex *attr, struct ibv_create_qp *cmd,
			     size_t cmd_size, struct ib_uverbs_create_qp_resp *resp,
			     size_t resp_size)
{
	const struct virtio_rdma_qp_req *drv = (void *)((uint8_t *)cmd + sizeof(*cmd));
	struct virtio_rdma_qp_resp *answer = (void *)((uint8_t *)resp + sizeof(*resp));
	struct vrdma_made how = { (uintptr_t)&vqp->qp, 0 };
	struct virtio_rdma_qp_create_req req = {};
	struct virtio_rdma_qp_create_resp made;
	int ret = 0;

	qp_to_wire(&req, attr, drv);
	if (drv->sq_entries)
		ret = ring(context, drv->sq_buf, ring_len(drv->sq_entries, drv->sq_log2_stride, 0),
			   &req.sq);
	if (!ret && drv->rq_entries)
		ret = ring(context, drv->rq_buf, ring_len(drv->rq_entries, drv->rq_log2_stride, 0),
			   &req.rq);
	if (!ret)
		ret = make_with_doorbells(context, VIRTIO_RDMA_CMD_QP_CREATE, how, &req,
					  sizeof(req), &made, sizeof(made));
	if (ret)
		return ret;
	qp_begin(context, vqp, attr);
	to_vqp(&vqp->qp)->sq_elements = le16toh(req.max_send_sge);
	vqp->qp.qp_num = le32toh(made.qpn);
	vqp->qp.handle = vqp->qp.qp_num;
	answer->qpn = vqp->qp.qp_num;
	answer->sq_db = le32toh(made.sq_db);
	answer->rq_db = le32toh(made.rq_db);
	answer->sq_db_mmap = db_mmap(context, answer->sq_db);
	answer->rq_db_mmap = db_mmap(context, answer->rq_db);
	return 0;
}

int vrdma_local_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask,
			  struct ibv_modify_qp *cmd, size_t cmd_size)
{
	struct virtio_rdma_qp_modify_req req = { .qpn = htole32(qp->handle) };
	struct virtio_rdma_qp_attr *w = &req.attr;
	int ret;

	if (mask & (IBV_QP_CAP | IBV_QP_ALT_PATH))
		return EOPNOTSUPP;
	vrdma_values_to_wire(w, a, (uint32_t)mask);
	w->qp_access_flags = htole32(a->qp_access_flags & 0x11f);
	if (mask & IBV_QP_AV) {
		if (!a->ah_attr.is_global)
			return EINVAL;
		av_to_wire(&w->ah, &a->ah_attr);
	}
	ret = vrdma_command(qp->context, VIRTIO_RDMA_CMD_QP_MODIFY, &req, sizeof(req), NULL, 0);
	/* Without a device every QP is in ERR. */
	if (ret == EIO && mask & IBV_QP_STATE && a->qp_state == IBV_QPS_ERR)
		ret = 0;
	if (!ret && mask & IBV_QP_STATE)
		qp->state = a->qp_state;
	return ret;
}

int vrdma_local_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask,
			 struct ibv_qp_init_attr *init, struct ibv_query_qp *cmd, size_t cmd_size)
{
	struct virtio_rdma_object_req req = { .object = htole32(qp->handle) };
	struct virtio_rdma_qp_query_resp found;
	const struct virtio_rdma_qp_attr *w = &found.attr;
	int ret = vrdma_command(qp->context, VIRTIO_RDMA_CMD_QP_QUERY, &req, sizeof(req), &found,
				sizeof(found));

	if (ret)
		return ret;
	memset(a, 0, sizeof(*a));
	vrdma_values_from_wire(a, w);
	av_from_wire(&a->ah_attr, &w->ah);
	memset(init, 0, sizeof(*init));
	init->qp_context = qp->qp_context;
	init->send_cq = qp->send_cq;
	init->recv_cq = qp->recv_cq;
	init->srq = qp->srq;
	init->qp_type = qp->qp_type;
	qp->state = a->qp_state;
	return 0;
}

int vrdma_local_destroy_qp(struct ibv_qp *qp)
{
	int ret = vrdma_destroy(qp->context, VIRTIO_RDMA_CMD_QP_DESTROY, qp->handle);

	if (!ret)
		forget_and_wait(qp->context, qp, &qp->mutex, &qp->cond, &qp->events_completed);
	return ret;
}

int vrdma_local_create_ah(struct ibv_pd *pd, struct ibv_ah *ah, struct ibv_ah_attr *attr,
			  struct ib_uverbs_create_ah_resp *resp, size_t resp_size)
{
	struct virtio_rdma_ah_resp *answer = (void *)((uint8_t *)resp + sizeof(*resp));
	struct virtio_rdma_ah_create_req req = { .pdn = htole32(pd->handle) };
	struct virtio_rdma_object_resp made;
	int ret;

	av_to_wire(&req.av, attr);
	ret = vrdma_command(pd->context, VIRTIO_RDMA_CMD_AH_CREATE, &req, sizeof(req), &made,
			    sizeof(made));
	if (ret)
		return ret;
	ah->handle = le32toh(made.object);
	ah->context = pd->context;
	ah->pd = pd;
	answer->ahn = ah->handle;
	return 0;
}

int vrdma_local_destroy_ah(struct ibv_ah *ah)
{
	return vrdma_destroy(ah->context, VIRTIO_RDMA_CMD_AH_DESTROY, ah->handle);
}

static int mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t opcode)
{
	struct virtio_rdma_mcast_req req = { .qpn = htole32(qp->handle) };

	memcpy(req.mgid, gid->raw, sizeof(req.mgid));
	return vrdma_command(qp->context, opcode, &req, sizeof(req), NULL, 0);
}

int vrdma_local_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	return mcast(qp, gid, VIRTIO_RDMA_CMD_MCAST_ATTACH);
}

int vrdma_local_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	return mcast(qp, gid, VIRTIO_RDMA_CMD_MCAST_DETACH);
}
