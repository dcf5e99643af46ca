// SPDX-License-Identifier: GPL-2.0
/*
 * Queue pair attributes. The device owns the state machine (docs/virtio-rdma.md, section 8).
 *
 * What is left to us is the kernel's rings: on the way to RESET they start over.
 */
#include "virtio_rdma.h"

#include "qp_attr.h"

/*
 * Rights to operations that a device does not have (FLUSH, since Linux 6.2) enable nothing and are
 * left out, as other drivers do: programs set them for every device.
 */
static u32 vrdma_qp_rights(struct vrdma *vr, u32 rights)
{
	u32 known = IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE | IB_ACCESS_REMOTE_READ |
		    IB_ACCESS_REMOTE_ATOMIC | IB_ACCESS_MW_BIND;

	if (vr->caps & VIRTIO_RDMA_CAP_FLUSH)
		known |= VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL;
	return rights & known;
}

static int vrdma_attr_to_wire(struct vrdma *vr, struct virtio_rdma_qp_attr *w,
			      const struct ib_qp_attr *a, int mask)
{
	vrdma_values_to_wire(w, a, mask);
	w->qp_access_flags = cpu_to_le32(vrdma_qp_rights(vr, a->qp_access_flags));
	return mask & IB_QP_AV ? vrdma_av_from_attr(&w->ah, &a->ah_attr) : 0;
}

static void vrdma_set_state(struct vrdma_qp *qp, enum ib_qp_state state)
{
	unsigned long flags;

	spin_lock_irqsave(&qp->sq.lock, flags);
	spin_lock_nested(&qp->rq.lock, SINGLE_DEPTH_NESTING);
	qp->state = state;
	spin_unlock(&qp->rq.lock);
	spin_unlock_irqrestore(&qp->sq.lock, flags);
}

int vrdma_modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibqp->device);
	struct vrdma_qp *qp = to_vqp(ibqp);
	struct virtio_rdma_qp_modify_req req = { .qpn = cpu_to_le32(qp->qpn) };
	int ret;

	if (mask & ~IB_QP_ATTR_STANDARD_BITS || mask & (IB_QP_CAP | IB_QP_ALT_PATH))
		return -EOPNOTSUPP;
	if (udata) {
		ret = ib_is_udata_in_empty(udata);
		if (ret)
			return ret;
	}
	ret = vrdma_attr_to_wire(vr, &req.attr, attr, mask);
	if (ret)
		return ret;
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_QP_MODIFY, qp->ctx->id, &req, sizeof(req), NULL, 0);
	/* Without a device every QP is in ERR, and kernel consumers can drain it (poll.c). */
	if (ret && vrdma_is_lost(vr) && mask & IB_QP_STATE && attr->qp_state == IB_QPS_ERR)
		ret = 0;
	if (ret)
		return ret;
	if (mask & IB_QP_STATE) {
		vrdma_set_state(qp, attr->qp_state);
		if (attr->qp_state == IB_QPS_RESET && !qp->user)
			vrdma_qp_reset_rings(qp);
	}
	return udata ? ib_respond_empty_udata(udata) : 0;
}

int vrdma_query_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
		   struct ib_qp_init_attr *init)
{
	struct vrdma_qp *qp = to_vqp(ibqp);
	struct virtio_rdma_object_req req = { .object = cpu_to_le32(qp->qpn) };
	struct virtio_rdma_qp_query_resp resp;
	int ret;

	ret = vrdma_cmd(to_vr(ibqp->device), VIRTIO_RDMA_CMD_QP_QUERY, qp->ctx->id, &req,
			sizeof(req), &resp, sizeof(resp));
	if (ret)
		return ret;
	memset(attr, 0, sizeof(*attr));
	vrdma_values_from_wire(attr, &resp.attr);
	vrdma_av_to_attr(ibqp->device, &attr->ah_attr, &resp.attr.ah);
	attr->cap = qp->cap;
	memset(init, 0, sizeof(*init));
	init->event_handler = ibqp->event_handler;
	init->qp_context = ibqp->qp_context;
	init->send_cq = ibqp->send_cq;
	init->recv_cq = ibqp->recv_cq;
	init->srq = ibqp->srq;
	init->cap = qp->cap;
	init->sq_sig_type = qp->sig_type;
	init->qp_type = ibqp->qp_type;
	init->port_num = 1;
	return 0;
}

static int vrdma_mcast(struct ib_qp *ibqp, const union ib_gid *gid, u16 opcode)
{
	struct vrdma_qp *qp = to_vqp(ibqp);
	struct virtio_rdma_mcast_req req = { .qpn = cpu_to_le32(qp->qpn) };

	memcpy(req.mgid, gid->raw, sizeof(req.mgid));
	return vrdma_cmd(to_vr(ibqp->device), opcode, qp->ctx->id, &req, sizeof(req), NULL, 0);
}

int vrdma_attach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	return vrdma_mcast(ibqp, gid, VIRTIO_RDMA_CMD_MCAST_ATTACH);
}

int vrdma_detach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	int ret = vrdma_mcast(ibqp, gid, VIRTIO_RDMA_CMD_MCAST_DETACH);

	return vrdma_is_lost(to_vr(ibqp->device)) ? 0 : ret;
}
